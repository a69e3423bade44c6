"""EAGLE-3 drafter directories: every published layout, and everything that can be wrong with one, named."""

import re

import pytest
import torch
from drafter_files import LAYOUTS, speculators, write_drafter
from eagle_engine import EagleError
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_checkpoint import read_drafter
from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.drafter_format import parse_drafter_config
from helpers import assert_exact
from tiny_engines import drafter_config, eagle3_config, random_drafter, random_tensors, tiny_target

TARGET = tiny_target("llama", num_hidden_layers=7)
VOCAB_SIZE = TARGET.config.vocab_size
OPTIONS = {
    "plain": {},
    "fc-norm": dict(fc_norm=True, norm_output=True),
    "fc-norm-alone": dict(fc_norm=True, norm_output=False),
    "norm-before-fc": dict(norm_before_fc=True, norm_before_residual=True),
    "narrow": dict(hidden_size=32, target_hidden_size=48),
    "whole-vocabulary": dict(draft_vocab_size=VOCAB_SIZE),
    "head-dim": dict(head_dim=20),
}
FULL = eagle3_config(TARGET, **OPTIONS["fc-norm"])


def raw_and_tensors(**options):
    raw = eagle3_config(TARGET, **options)
    return raw, random_tensors(raw)


def refused(tmp_path, raw, tensors, message: str, **arguments) -> None:
    """The directory is refused, by its name and with the message."""
    directory = write_drafter(tmp_path / "d", raw, tensors)
    with pytest.raises(EagleError, match=message) as caught:
        read_drafter(directory, **arguments)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_reads_as_the_same_drafter(tmp_path, layout, options, binary):
    raw, tensors = raw_and_tensors(**OPTIONS[options])
    written, named = LAYOUTS[layout](raw, tensors)
    if layout == "published" and "head_dim" in raw:
        written["head_dim"] = raw["head_dim"]
    config, read = read_drafter(write_drafter(tmp_path / "d", written, named, binary))
    assert config == parse_drafter_config(raw)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_exact(read[name], tensor)


def test_what_config_json_says_is_what_the_config_holds():
    config = parse_drafter_config(eagle3_config(TARGET, head_dim=20, hidden_size=32, target_hidden_size=48, rope_theta=700.0, norm_before_fc=True))
    assert (config.version, config.layer.head_dim, config.layer.hidden_size, config.target_hidden_size, config.fused_size) == (3, 20, 32, 48, 144)
    assert (config.layer.rope_theta, config.draft_vocab_size, config.captured_layer_ids) == (700.0, 57, None)
    assert (config.fc_norm, config.norm_before_fc, config.norm_before_residual, config.norm_output) == (False, True, False, False)
    plain = parse_drafter_config(eagle3_config(TARGET))
    assert (plain.layer.head_dim, plain.layer.rope_theta, plain.target_hidden_size) == (12, 10000.0, 48)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    assert parse_drafter_config(eagle3_config(TARGET, rope_scaling=llama3)).layer.rope_scaling == llama3


def test_flags_may_stand_in_eagle_config():
    assert parse_drafter_config(eagle3_config(TARGET, eagle_config={"norm_before_fc": True})).norm_before_fc
    with pytest.raises(EagleError, match="norm_before_fc twice"):
        parse_drafter_config(eagle3_config(TARGET, norm_before_fc=False, eagle_config={"norm_before_fc": True}))
    with pytest.raises(EagleError, match="norm_output: expected true or false, got 'yes'"):
        parse_drafter_config(eagle3_config(TARGET, norm_output="yes"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_written_is_read_again(tmp_path, options):
    """DrafterConfig.to_dict with the canonical names."""
    raw, tensors = raw_and_tensors(**OPTIONS[options])
    config = parse_drafter_config(raw)
    for ids in (None, (1, 3, 6)):
        config = DrafterConfig(**(vars(config) | {"captured_layer_ids": ids}))
        again, _ = read_drafter(write_drafter(tmp_path / f"d{ids is None}", config.to_dict("float32"), tensors))
        assert again.captured_layer_ids == ids
        assert (again.expected_tensors(), again.prefix, again.fused_size, again.layer.head_dim, again.layer.rope_theta) == (
            config.expected_tensors(), config.prefix, config.fused_size, config.layer.head_dim, config.layer.rope_theta,
        )  # fmt: skip
        assert [getattr(again, flag) for flag in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")] == [
            getattr(config, flag) for flag in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
        ]


# Versions


def test_the_version_is_told_by_the_tensors(tmp_path):
    assert read_drafter(write_drafter(tmp_path / "three", *raw_and_tensors()))[0].version == 3
    one = drafter_config(TARGET)
    assert read_drafter(write_drafter(tmp_path / "one", one, random_tensors(one)))[0].version == 1


@pytest.mark.parametrize("layout", ["published", "speculators"])
def test_config_and_tensors_of_two_versions_contradict_each_other(tmp_path, layout):
    raw, tensors = LAYOUTS[layout](*raw_and_tensors())
    one = drafter_config(TARGET)
    refused(tmp_path, raw, random_tensors(one), "contradict each other: config.json is that of an EAGLE-3 drafter .*the tensors are those of an EAGLE-1/2")
    refused(tmp_path, one, tensors, "contradict each other: config.json is that of an EAGLE-1/2 drafter .*the tensors are those of an EAGLE-3")


def test_tensors_are_known_by_their_width_when_no_name_tells(tmp_path):
    raw, tensors = speculators(*raw_and_tensors(draft_vocab_size=VOCAB_SIZE))
    del tensors["layers.0.hidden_norm.weight"]
    refused(tmp_path, drafter_config(TARGET), tensors, "tensors are those of an EAGLE-3 drafter .*twice as wide")
    refused(tmp_path, raw, tensors, "missing tensor midlayer.hidden_norm.weight")


def test_a_config_that_contradicts_itself(tmp_path):
    refused(tmp_path, eagle3_config(TARGET, architectures=["LlamaForCausalLMEagle"]), raw_and_tensors()[1], "contradicts itself: LlamaForCausalLMEagle is an EAGLE-1/2 drafter, draft_vocab_size")


def test_sglang_files_of_eagle1_have_a_head(tmp_path):
    raw = drafter_config(TARGET, architectures=["LlamaForCausalLMEagle"])
    head = torch.randn(VOCAB_SIZE, 48)
    config, tensors = read_drafter(write_drafter(tmp_path / "d", raw, random_tensors(raw) | {"lm_head.weight": head}))
    assert config.version == 1
    assert_exact(tensors["lm_head.weight"], head)


# Tensors


@pytest.mark.parametrize("layout", ["published", "half-prefixed", "speculators"])
@pytest.mark.parametrize("name", [*parse_drafter_config(FULL).expected_tensors(), "input_norm.weight", "embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path, name, layout):
    special = {"input_norm.weight": dict(norm_before_fc=True), "embed_tokens.weight": OPTIONS["narrow"]}
    raw, tensors = raw_and_tensors(**special.get(name, OPTIONS["fc-norm"]))
    del tensors[name]
    refused(tmp_path, *LAYOUTS[layout](raw, tensors), f"missing tensor {name}|norm_before_fc, but there is no tensor {name}")


@pytest.mark.parametrize("name", [*parse_drafter_config(FULL).expected_tensors(), "input_norm.weight", "embed_tokens.weight"])
def test_a_misshaped_tensor_is_named(tmp_path, name):
    raw, tensors = raw_and_tensors(**(dict(norm_before_fc=True) if name == "input_norm.weight" else OPTIONS["fc-norm"]))
    tensor = tensors.get(name, torch.zeros(VOCAB_SIZE, 48))
    tensors[name] = torch.cat((tensor, tensor[:1]))
    refused(tmp_path, raw, tensors, f"{name}: expected shape")


@pytest.mark.parametrize("name", ["fc.bias", "midlayer.self_attn.q_proj.bias", "midlayer.self_attn.q_norm.weight", "layers.0.typo", "typo", "norm.bias", "input_norm.0.weight"])
def test_an_unused_tensor_is_named(tmp_path, name):
    raw, tensors = raw_and_tensors()
    message = "the layer is there twice, as midlayer.* and as layers.0.typo" if name.startswith("layers.0") else f"unused tensor {name}"
    refused(tmp_path, raw, tensors | {name: torch.zeros(48)}, re.escape(message))


def test_a_tensor_under_two_names_is_refused(tmp_path):
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, tensors | {"model.norm.weight": torch.zeros(48)}, "norm.weight is there twice")


def test_tables_of_rotary_embeddings_are_passed_over(tmp_path):
    raw, tensors = raw_and_tensors()
    read_drafter(write_drafter(tmp_path / "d", raw, tensors | {"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(6)}))


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.float64], ids=str)
def test_weights_of_another_dtype_are_refused(tmp_path, name, dtype):
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, tensors | {name: tensors[name].to(dtype)}, f"tensor {name} is {str(dtype)[6:]}; expected float32 or bfloat16 or float16")


@pytest.mark.parametrize("make", [drafter_config, eagle3_config], ids=["eagle-1", "eagle-3"])
def test_weights_in_8_bits_are_plain_numbers(tmp_path, make):
    """As the trainer can export them, norms and biases in 16 bits; a scale beside a weight would be an unused tensor."""
    raw = make(TARGET, torch_dtype="float8_e4m3fn")
    tensors = {name: tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor for name, tensor in random_tensors(raw).items()}
    directory = write_drafter(tmp_path / "d", raw, tensors)
    wide = {name: tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in tensors.items()}
    drafters = [Drafter.from_directory(directory, TARGET, max_positions=64), Drafter(parse_drafter_config(raw), wide, TARGET, max_positions=64)]
    features = torch.randn(4, 3 * 48 if raw.get("draft_vocab_size") else 48)
    assert_exact(*(drafter.logits(drafter.fuse(features)) for drafter in drafters))
    refused(tmp_path, raw, tensors | {"fc.weight_scale": torch.ones(())}, "unused tensor fc.weight_scale")
    norm = next(name for name in tensors if name.endswith("post_attention_layernorm.weight"))
    refused(tmp_path, raw, tensors | {norm: tensors[norm].to(torch.float8_e4m3fn)}, f"tensor {norm} is float8_e4m3fn; expected float32 or bfloat16 or float16")


@pytest.mark.parametrize("flag, names", [("fc_norm", ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]), ("norm_before_fc", ["input_norm.weight"])])
@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_flag_and_its_tensors_belong_together(tmp_path, flag, names, layout):
    plain, without = raw_and_tensors()
    raw, tensors = raw_and_tensors(**{flag: True, "norm_output": False})
    refused(tmp_path, *LAYOUTS[layout](raw, without), f"config.json sets {flag}, but there is no tensor {', '.join(names)}")
    refused(tmp_path, *LAYOUTS[layout](plain, tensors), f"there is a tensor {', '.join(names)}, but config.json does not set {flag}")


def test_flags_that_readers_take_differently_must_be_said(tmp_path):
    raw, tensors = speculators(*raw_and_tensors())
    del raw["norm_before_residual"]
    refused(tmp_path, raw, tensors, "does not say norm_before_residual.*vLLM takes true, the converter of speculators false")
    raw, tensors = raw_and_tensors(fc_norm=True, norm_output=False)
    del raw["norm_output"]
    refused(tmp_path, raw, tensors, "sets fc_norm and does not say norm_output.*SpecForge takes true, SGLang false")


def test_two_ways_to_normalise_the_same_states_are_refused():
    with pytest.raises(EagleError, match="fc_norm and norm_before_fc"):
        parse_drafter_config(eagle3_config(TARGET, fc_norm=True, norm_before_fc=True, norm_output=True))


UNSUPPORTED = {
    "layers": (dict(num_hidden_layers=2), "one layer, this one has 2"),
    "no-states": (dict(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
    "four-states": (dict(num_aux_hidden_states=4), "num_aux_hidden_states 4 is not supported"),
    "p-eagle": (dict(mask_token_id=5), "P-EAGLE drafter"),
    "p-eagle-pard": (dict(pard_token=5), "P-EAGLE drafter"),
    "bias": (dict(attention_bias=True), "attention_bias is not supported"),
    "window": (dict(layer_types=["sliding_attention"]), "sliding window"),
    "yarn": (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope type 'yarn'"),
    "draft-vocab": (dict(draft_vocab_size=VOCAB_SIZE + 1), "draft_vocab_size: expected a whole number from 1"),
    "draft-vocab-0": (dict(draft_vocab_size=0), "draft_vocab_size: expected a whole number of 1 or more"),
    "quantised": (dict(quantization_config={"quant_method": "fp8"}), "quantised"),
    "activation": (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
}


@pytest.mark.parametrize("options, message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_computed_is_refused_by_name(options, message):
    with pytest.raises(EagleError, match=message):
        parse_drafter_config(eagle3_config(TARGET, **options))


def test_other_drafters_are_refused_by_name(tmp_path):
    raw, tensors = raw_and_tensors()
    refused(tmp_path, raw, tensors | {"mask_hidden": torch.zeros(48)}, "P-EAGLE drafter .tensor mask_hidden.")
    written, named = speculators(raw, tensors)
    refused(tmp_path, written, named | {"layers.1.mlp.up_proj.weight": torch.zeros(2)}, "several layers .tensor layers.1.mlp.up_proj.weight.")
    one = random_tensors(drafter_config(TARGET))
    for kind, found in (("peagle", named), ("eagle", one), ("dflash", named)):
        refused(tmp_path, written | {"speculators_model_type": kind}, found, f"speculators_model_type '{kind}' is not supported")
    del written["transformer_layer_config"]
    refused(tmp_path, written, named, "transformer_layer_config, which is missing")


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
