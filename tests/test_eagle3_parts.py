"""EAGLE-3 drafters: the draft vocabulary, the captured layers, and what must fit the target."""

import pytest
import torch
from drafter_files import speculators, write_drafter
from eagle_engine import EagleError
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_checkpoint import read_drafter
from eagle_engine.drafter_format import parse_drafter_config
from helpers import assert_exact
from tiny_engines import drafter_config, eagle3_config, random_drafter, random_tensors, tiny_target
from test_eagle3_checkpoint import OPTIONS, TARGET, VOCAB_SIZE, raw_and_tensors, refused

# The draft vocabulary


def edited(tensors, name, edit):
    tensor = tensors[name].clone()
    return tensors | {name: edit(tensor)}


def put(index, value):
    def edit(tensor):
        tensor[index] = value
        return tensor

    return edit


VOCABULARY = {
    "above": ("d2t", put(56, VOCAB_SIZE - 56), f"d2t: draft id 56 is token {VOCAB_SIZE}, expected 0 to {VOCAB_SIZE - 1} .1 such ids"),
    "below": ("d2t", put(0, -1), "d2t: draft id 0 is token -1"),
    "all-zero": ("d2t", torch.zeros_like, "d2t is all zero for 57 of 83 tokens"),
    "d2t-dtype": ("d2t", lambda tensor: tensor.int(), "tensor d2t is int32; expected int64"),
    "t2d-dtype": ("t2d", lambda tensor: tensor.long(), "tensor t2d is int64; expected bool"),
    "t2d-all": ("t2d", torch.ones_like, "t2d marks 83 tokens, draft_vocab_size is 57"),
}


@pytest.mark.parametrize("name, edit, message", VOCABULARY.values(), ids=VOCABULARY)
def test_a_broken_draft_vocabulary_is_named(tmp_path, name, edit, message):
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, edited(tensors, name, edit), message)


def test_a_token_twice_in_the_draft_vocabulary_is_named(tmp_path):
    raw, tensors = raw_and_tensors()
    twice = int(tensors["d2t"][7]) + 7
    refused(tmp_path, raw, edited(tensors, "d2t", put(20, twice - 20)), f"d2t: token {twice} stands 2 times")


def test_the_first_tokens_may_be_the_draft_vocabulary(tmp_path):
    """Then d2t is zero and t2d says so; an exporter that has lost the vocabulary leaves a t2d of other tokens, or of none."""
    raw, tensors = raw_and_tensors()
    first = torch.arange(VOCAB_SIZE) < 57
    assert Drafter.from_directory(write_drafter(tmp_path / "first", raw, tensors | {"d2t": torch.zeros(57, dtype=torch.int64), "t2d": first}), TARGET, max_positions=64).draft_to_target.tolist() == list(range(57))
    refused(tmp_path, raw, tensors | {"d2t": torch.zeros(57, dtype=torch.int64), "t2d": torch.zeros_like(first)}, "d2t is all zero for 57 of 83 tokens")


def test_target_ids_instead_of_offsets_are_noticed(tmp_path):
    """The most common mistake of an exporter: d2t holds the ids themselves."""
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, tensors | {"d2t": tensors["d2t"] + torch.arange(57)}, "d2t: ")


def test_d2t_and_t2d_that_disagree_are_named(tmp_path):
    raw, tensors = raw_and_tensors()
    inside, outside = int(tensors["t2d"].nonzero()[3]), int((~tensors["t2d"]).nonzero()[2])
    swapped = edited(edited(tensors, "t2d", put(inside, False)), "t2d", put(outside, True))
    refused(tmp_path, raw, swapped, f"d2t and t2d disagree: token {inside} ")


def test_a_whole_vocabulary_needs_no_mapping_and_may_have_one_that_says_nothing(tmp_path):
    raw, tensors = raw_and_tensors(draft_vocab_size=VOCAB_SIZE)
    nothing = {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}
    for more in ({}, nothing, {"t2d": nothing["t2d"]}):
        config, read = read_drafter(write_drafter(tmp_path / "d", raw, tensors | more))
        assert not config.has_own_vocab and read.keys() == tensors.keys()
    message = "draft_vocab_size is the whole vocabulary of 83, but d2t and t2d choose"
    refused(tmp_path, raw, tensors | edited(nothing, "d2t", put(slice(0, 2), torch.tensor([1, -1]))), message)
    refused(tmp_path, raw, tensors | edited(nothing, "t2d", put(4, False)), message)


def test_a_missing_draft_vocab_size_is_the_whole_vocabulary_for_a_drafter_that_calls_itself_eagle3(tmp_path):
    raw, tensors = raw_and_tensors(draft_vocab_size=VOCAB_SIZE)
    del raw["draft_vocab_size"]
    assert read_drafter(write_drafter(tmp_path / "d", raw, tensors))[0].draft_vocab_size == VOCAB_SIZE
    raw["architectures"] = ["LlamaForCausalLM"]
    refused(tmp_path, raw, tensors, "contradict each other")


# Captured layers


IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "eagle_aux_hidden_state_layer_id_convention"


@pytest.mark.parametrize("nested", [False, True], ids=["top-level", "eagle_config"])
def test_ids_of_captured_layers_say_what_they_count(nested):
    def parsed(argument=None, **keys):
        return parse_drafter_config(eagle3_config(TARGET, **({"eagle_config": keys} if nested else keys)), argument).captured_layer_ids

    assert parsed() is None and parsed("output") is None  # the default layers are inputs for every reader
    for convention, expected in (("input", (1, 3, 5)), ("output", (2, 4, 6))):
        assert parsed(**{IDS: [1, 3, 5], CONVENTION: convention}) == expected
        assert parsed(convention, **{IDS: [1, 3, 5]}) == expected
        assert parsed(convention, **{IDS: [1, 3, 5], CONVENTION: convention}) == expected
    with pytest.raises(EagleError, match=r"disagree.*inputs of layers \[1, 3, 5\].*SGLang its output \(the inputs of layers \[2, 4, 6\]\).*--draft-layer-ids"):
        parsed(**{IDS: [1, 3, 5]})
    with pytest.raises(EagleError, match="draft_layer_ids is 'input', but .* counts outputs"):
        parsed("input", **{IDS: [1, 3, 5], CONVENTION: "output"})
    with pytest.raises(EagleError, match="expected input or output, got 'before'"):
        parsed(**{IDS: [1, 3, 5], CONVENTION: "before"})
    with pytest.raises(EagleError, match="draft_layer_ids: expected input or output, got 'before'"):
        parsed("before")


def test_ids_of_a_speculators_file_are_inputs():
    written, _ = speculators(eagle3_config(TARGET, **{IDS: [1, 3, 5]}), {})
    assert parse_drafter_config(written).captured_layer_ids == (1, 3, 5)
    with pytest.raises(EagleError, match="counts inputs"):
        parse_drafter_config(written, "output")


@pytest.mark.parametrize("ids, message", [([1, 3], "expected 3 different"), ([1, 3, 5, 6], "expected 3 different"), ([5, 3, 1], "ascending"), ([1, 1, 3], "different"), ("1,2,3", "expected a list"), ([1, 2, 3.0], "expected a list")])
def test_ids_that_are_no_three_ascending_layers_are_refused(ids, message):
    with pytest.raises(EagleError, match=message):
        parse_drafter_config(eagle3_config(TARGET, **{IDS: ids}), "input")


def test_captured_layers_of_a_target():
    config = parse_drafter_config(eagle3_config(TARGET))
    assert [config.captured_layers(n) for n in (7, 8, 32, 36)] == [(2, 3, 4), (2, 4, 5), (2, 16, 29), (2, 18, 33)]
    with pytest.raises(EagleError, match="need a target of 7 layers or more, this one has 6"):
        config.captured_layers(6)
    for ids in ([0, 3, 7], [1, 3, 5]):
        assert parse_drafter_config(eagle3_config(TARGET, **{IDS: ids}), "input").captured_layers(7) == tuple(ids)
    for ids in ([0, 3, 8], [-1, 3, 5]):
        with pytest.raises(EagleError, match="a target of 7 layers has inputs 0 to 6, and 7"):
            parse_drafter_config(eagle3_config(TARGET, **{IDS: ids}), "input").captured_layers(7)
    assert parse_drafter_config(drafter_config(TARGET)).captured_layers(7) == ()


# Drafter and target


@pytest.mark.parametrize(
    "options, message",
    [(dict(hidden_size=32), "hidden_size of the drafter is 32, of the target 48"), (dict(target_hidden_size=64), "target_hidden_size of the drafter is 64, of the target 48"), (dict(vocab_size=99), "vocab_size of the drafter is 99, of the target 83")],
    ids=["narrow", "target-hidden", "vocabulary"],
)
def test_a_drafter_of_another_target_is_refused(options, message):
    raw = eagle3_config(TARGET, **options)
    with pytest.raises(EagleError, match=f"another target: {message}"):
        Drafter(parse_drafter_config(raw), random_tensors(raw), TARGET, max_positions=64)


def test_a_target_without_the_layers_is_refused():
    small = tiny_target("llama")
    raw = eagle3_config(small)
    with pytest.raises(EagleError, match="need a target of 7 layers"):
        Drafter(parse_drafter_config(raw), random_tensors(raw), small, max_positions=64)


def test_embedding_and_head_are_the_drafters_own_where_it_has_them(tmp_path):
    def load(raw, tensors):
        return Drafter.from_directory(write_drafter(tmp_path / "d", raw, tensors), TARGET, max_positions=64)

    raw, tensors = raw_and_tensors()
    copied = TARGET.embed(torch.arange(VOCAB_SIZE))
    for more in ({}, {"embed_tokens.weight": copied}):
        assert load(raw, tensors | more).embedding is TARGET.embedding
    own = load(raw, tensors | {"embed_tokens.weight": copied + 1})
    assert own.embedding is not TARGET.embedding and own.num_bytes > load(raw, tensors).num_bytes
    narrow = load(*raw_and_tensors(**OPTIONS["narrow"]))
    assert narrow.embedding.in_features == 32
    x = torch.randn(3, 48)
    norm = x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors["norm.weight"]
    assert torch.allclose(own.logits(x), norm @ tensors["lm_head.weight"].T, atol=1e-4)
    assert own.vocab_size == 57
    assert own.draft_to_target.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()


def test_two_draft_vocabularies_are_refused(tmp_path):
    directory = write_drafter(tmp_path / "d", *raw_and_tensors())
    for vocabulary in (20, tmp_path / "tokens.npy"):
        with pytest.raises(EagleError, match="vocabulary of its own, of 57 tokens"):
            Drafter.from_directory(directory, TARGET, max_positions=64, draft_vocab=vocabulary)
    whole = eagle3_config(TARGET, draft_vocab_size=VOCAB_SIZE)
    ids = torch.randperm(VOCAB_SIZE)[:29]
    config, tensors, features = parse_drafter_config(whole), random_tensors(whole), torch.randn(4, 48)
    full, reduced = (Drafter(config, tensors, TARGET, max_positions=64, draft_vocab=vocabulary) for vocabulary in (None, ids))
    assert_exact(reduced.logits(features), full.logits(features)[:, ids].contiguous())
    assert reduced.draft_to_target.tolist() == ids.tolist()


def test_the_rope_table_is_the_drafters_own():
    """Its base and not the target's; as long as what is served and not as its max_position_embeddings."""
    drafter = Drafter(parse_drafter_config(eagle3_config(TARGET, rope_theta=700.0)), random_tensors(eagle3_config(TARGET)), TARGET, max_positions=200)
    assert drafter.config.layer.max_position_embeddings == 64 and drafter.rope_table.shape == (200, 12)
    angle = torch.tensor(199 * 700.0 ** (-2 / 12), dtype=torch.float64)
    assert drafter.rope_table[199, 1] == angle.cos().float() and drafter.rope_table[199, 7] == angle.sin().float()
    assert random_drafter(TARGET).rope_table[199, 1] != drafter.rope_table[199, 1]
