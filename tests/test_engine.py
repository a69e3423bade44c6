"""Requests from beginning to end: where they stop, what they cost, and what happens when something is wrong."""

import pytest
import torch
from eagle_engine import Engine, SamplingParams
from eagle_engine.tokenizer import Tokenizer
from eagle_kernels import pack_weight, unpack_weight
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import TREES, bigram_drafter, drafter_config, eagle3_config, make_drafter, make_engine, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import VOCAB_SIZE, random_tokens
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

GREEDY = dict(temperature=0.0)


def tiny_tokenizer() -> Tokenizer:
    """One token, one piece of text; some pieces have several characters, some are half of a character."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    pieces = ["<unk>", "<s>", "</s>", "ab", "abc", "ba", "Ġthe", "ĠaÃ", "©", "Ã", "¤b", ".", "cab", "ĠĠ"] + alphabet
    vocab = {}
    for piece in pieces:
        vocab.setdefault(piece, len(vocab))
    vocab = dict(list(vocab.items())[:VOCAB_SIZE])
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, None, {"eos_token": "</s>"}, (2,))


def engines(drafter_text: list[int] | None = None, **options) -> dict[str, Engine]:
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    drafter = random_drafter(target) if drafter_text is None else oracle_drafter(target, drafter_text, ranks=[0, 0, 1, 0, 2, 0])
    return {"plain": make_engine(target, None, tokenizer, eos=(2,), **options), "speculative": make_engine(target, drafter, tokenizer, eos=(2,), **options)}


PROMPT = random_tokens(40, 8)
ANSWER = plain_tokens(tiny_target("llama"), PROMPT, SamplingParams(temperature=3.0, seed=3, max_tokens=60))
PARAMS = dict(temperature=3.0, seed=3, ignore_eos=True)


def test_the_answer_used_here_is_varied():
    assert len(set(ANSWER)) > 25


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_max_tokens_is_met_exactly(max_tokens):
    for name, engine in engines(PROMPT + ANSWER).items():
        output = engine.generate([PROMPT], SamplingParams(**PARAMS, max_tokens=max_tokens))[0]
        assert output.token_ids == ANSWER[:max_tokens], name
        assert output.finish_reason == "length"


@pytest.mark.parametrize("at", range(14))
def test_stop_token_at_every_depth_of_an_accepted_path(at):
    params = SamplingParams(**PARAMS, max_tokens=40, stop_token_ids=[ANSWER[at]])
    first = ANSWER.index(ANSWER[at])
    for name, engine in engines(PROMPT + ANSWER).items():
        output = engine.generate([PROMPT], params)[0]
        assert output.token_ids == ANSWER[: first + 1], name
        assert (output.finish_reason, output.stop_reason) == ("stop", ANSWER[at])


@pytest.mark.parametrize("at", range(14))
def test_end_token_at_every_depth_of_an_accepted_path(at):
    target = tiny_target("llama")
    first = ANSWER.index(ANSWER[at])
    for drafter in (None, oracle_drafter(target, PROMPT + ANSWER)):
        engine = make_engine(target, drafter, tiny_tokenizer(), eos=(ANSWER[at], 2), max_batch_size=1)
        params = SamplingParams(temperature=3.0, seed=3, max_tokens=40)
        output, following = engine.generate([PROMPT, PROMPT], params)
        assert output.token_ids == following.token_ids == ANSWER[: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert engine.pages.num_free == engine.pages.num_pages


@pytest.mark.parametrize("include", [False, True])
def test_text_of_a_stop_token(include):
    params = SamplingParams(**PARAMS, max_tokens=40, stop_token_ids=[ANSWER[5]], include_stop_str_in_output=include)
    for name, engine in engines(PROMPT + ANSWER).items():
        output = engine.generate([PROMPT], params)[0]
        assert output.text == engine.tokenizer.decode(output.token_ids if include else output.token_ids[:-1]), name
        assert "".join(piece.text for piece in engine.stream(PROMPT, params)) == output.text


@given(data=st.data())
def test_stop_strings_cut_where_plain_decoding_stops(data):
    """Strings from anywhere in the text: within a token, over several tokens, within an accepted run, over two runs."""
    pair = engines(PROMPT + ANSWER, **data.draw(st.sampled_from(list(TREES.values()))))
    text = pair["plain"].generate([PROMPT], SamplingParams(**PARAMS, max_tokens=40))[0].text
    stops = []
    for _ in range(data.draw(st.integers(1, 2))):
        start = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + data.draw(st.integers(1, 6))])
    include = data.draw(st.booleans())
    params = SamplingParams(**PARAMS, max_tokens=40, stop=stops, include_stop_str_in_output=include)
    plain, speculative = (engine.generate([PROMPT], params)[0] for engine in pair.values())
    assert (plain.text, plain.token_ids, plain.finish_reason, plain.stop_reason) == (speculative.text, speculative.token_ids, speculative.finish_reason, speculative.stop_reason)
    if "\ufffd" not in "".join(stops):
        assert plain.finish_reason == "stop" and plain.stop_reason in stops
        assert all(stop not in plain.text.removesuffix(plain.stop_reason if include else "") for stop in stops)
        assert text.startswith(plain.text)
    for engine in pair.values():
        pieces = list(engine.stream(PROMPT, params))
        assert "".join(piece.text for piece in pieces) == plain.text
        assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_the_longest_sequence_ends_in_the_middle_of_a_tree():
    """The cache holds max_model_len tokens and the rows of one tree: decoding goes on to the last token, then stops as plain decoding does."""
    for length in range(len(PROMPT) + 1, len(PROMPT) + 12):
        outputs = {}
        for name, engine in engines(PROMPT + ANSWER, max_model_len=length, num_pages=None).items():
            output = engine.generate([PROMPT], SamplingParams(**PARAMS, max_tokens=500))[0]
            outputs[name] = (output.token_ids, output.finish_reason)
            assert len(PROMPT) + len(output.token_ids) == length
        assert outputs["plain"] == outputs["speculative"] == (ANSWER[: length - len(PROMPT)], "length")


@pytest.mark.parametrize("options", [dict(max_depth=1, top_k=1, num_nodes=2), dict(max_depth=1, top_k=4, num_nodes=3), dict(top_k=1, max_depth=3, num_nodes=2), dict(num_nodes=1), dict(top_k=3, max_depth=2, num_nodes=13), dict(tree="chain", max_depth=1), dict(tree="static", choices=((5,),)), dict(top_k=8, max_depth=9, num_nodes=200)], ids=str)  # fmt: skip
@pytest.mark.parametrize("prompt_length", [1, 2, 40])
def test_extreme_trees_and_prompts(options, prompt_length):
    target = tiny_target("llama")
    prompt, params = random_tokens(41, prompt_length), SamplingParams(**GREEDY, max_tokens=12)
    expected = plain_tokens(target, prompt, params, max_model_len=300)
    for drafter in (random_drafter(target), bigram_drafter(target, [prompt + expected])):
        engine = make_engine(target, drafter, max_model_len=300, **options)
        for count in (1, 12):
            assert engine.generate([prompt], SamplingParams(**GREEDY, max_tokens=count))[0].token_ids == expected[:count]


def test_prompt_beyond_the_drafters_max_position_embeddings():
    target = tiny_target("llama")
    prompt, params = random_tokens(42, 90), SamplingParams(**GREEDY, max_tokens=20)
    drafter = random_drafter(target, max_position_embeddings=32)
    assert make_engine(target, drafter).generate([prompt], params)[0].token_ids == plain_tokens(target, prompt, params)


def test_reduced_draft_vocabulary_changes_nothing():
    target = tiny_target("llama")
    params = SamplingParams(temperature=0.8, seed=6, max_tokens=30)
    expected = plain_tokens(target, PROMPT, params)
    for size in (4, 37, VOCAB_SIZE):
        drafter = random_drafter(target, draft_vocab=torch.randperm(VOCAB_SIZE)[:size])
        assert make_engine(target, drafter).generate([PROMPT], params)[0].token_ids == expected


def broken_target(token: int, value: float):
    """A target that gives NaN or infinite features once `token` is in the context."""
    target = tiny_target("llama", seed=token)
    weight = unpack_weight(target.embedding)
    weight[token] = value
    broken = object.__new__(type(target))
    broken.__dict__.update(target.__dict__)
    broken.embedding = pack_weight(weight)
    return broken


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_unusable_logits_end_their_own_request_only(value):
    bad_token = 77
    target = broken_target(bad_token, value)
    good, bad = [1, 2, 3], [4, bad_token, 5]
    params = SamplingParams(**GREEDY, max_tokens=12)
    for drafter in (None, random_drafter(target)):
        engine = make_engine(target, drafter)
        alone = engine.generate([good], params)[0]
        outputs = engine.generate([good, bad, good], params)
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
        assert "logits were not usable at position 3" in outputs[1].error
        assert outputs[0].token_ids == outputs[2].token_ids == alone.token_ids
        assert engine.pages.num_free == engine.pages.num_pages


def test_unusable_logits_in_the_middle_of_an_answer():
    """The token that breaks the target is drawn at some point: plain and speculative decoding report the same place."""
    target = broken_target(ANSWER[9], float("nan"))
    params = SamplingParams(temperature=3.0, seed=3, max_tokens=40)
    first = ANSWER.index(ANSWER[9])
    for drafter in (None, oracle_drafter(target, PROMPT + ANSWER), random_drafter(target)):
        output = make_engine(target, drafter).generate([PROMPT], params)[0]
        assert output.finish_reason == "error"
        assert output.token_ids == ANSWER[: first + 1]
        assert f"position {len(PROMPT) + first + 1} " in output.error


def test_all_equal_logits_draft_and_accept():
    target = tiny_target("llama")
    flat = object.__new__(type(target))
    flat.__dict__.update(target.__dict__)
    flat.head = pack_weight(torch.zeros(VOCAB_SIZE, target.config.hidden_size))
    params = SamplingParams(**GREEDY, max_tokens=13)
    output = make_engine(flat, random_drafter(flat), top_k=3, max_depth=3, num_nodes=22).generate([PROMPT], params)[0]
    assert output.token_ids == [0] * 13  # smaller id wins ties
    assert output.stats.acceptance_length == 4.0


@pytest.mark.parametrize("config", [drafter_config, eagle3_config], ids=["eagle-1", "eagle-3"])
def test_a_drafter_of_nan_changes_nothing(config):
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = make_drafter(target, config(target), edit=lambda tensors: tensors["fc.weight"].fill_(float("nan")))
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=20)
    for tree in TREES.values():
        assert make_engine(target, drafter, **tree).generate([PROMPT], params)[0].token_ids == plain_tokens(target, PROMPT, params)
