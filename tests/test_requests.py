"""Requests beside each other: pages, aborts, streams, and what is told of them."""

import pytest
import torch
from eagle_engine import EagleConfig, EagleError, Engine, SamplingParams
from eagle_engine.request import Request
from test_step_graphs import CountingGraphs
from tiny_engines import make_engine, plain_tokens, random_drafter, tiny_target
from tiny_targets import random_tokens
from tiny_tokenizers import byte_fallback_tokenizer
from test_engine import ANSWER, GREEDY, PARAMS, PROMPT, engines, tiny_tokenizer


def test_requests_wait_for_pages_and_give_them_back():
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), num_pages=16, max_batch_size=4)
    params = SamplingParams(**GREEDY, max_tokens=20)
    prompts = [random_tokens(50 + i, 10) for i in range(5)]
    expected = [plain_tokens(target, prompt, params) for prompt in prompts]
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs = {}
    most = 0
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output.token_ids
        most = max(most, len(engine.scheduler.running))
    assert [outputs[i] for i in ids] == expected
    assert most == 3 and engine.scheduler.num_preemptions > 0  # three prompts find room, three answers do not
    assert engine.pages.num_free == 16
    with pytest.raises(EagleError, match="pages of the KV cache"):
        engine.add_request(prompts[0], SamplingParams(**GREEDY, max_tokens=150))


def test_abort_ends_one_request_and_frees_its_pages():
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), max_batch_size=2)
    params = SamplingParams(**GREEDY, max_tokens=30)
    ids = [engine.add_request(random_tokens(60 + i, 5), params) for i in range(3)]
    engine.step()
    aborted = engine.abort(ids[0])
    assert aborted.finish_reason == "abort" and len(aborted.token_ids) >= 1
    waiting = engine.abort(ids[2])
    assert waiting.finish_reason == "abort" and waiting.token_ids == []
    assert engine.abort(ids[2]) is None
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == [ids[1]]
    assert outputs[0].token_ids == plain_tokens(target, random_tokens(61, 5), params)
    assert engine.pages.num_free == engine.pages.num_pages


def test_a_closed_stream_frees_its_pages():
    engine = engines()["speculative"]
    stream = engine.stream(PROMPT, SamplingParams(**GREEDY, max_tokens=50))
    next(stream)
    stream.close()
    assert not engine.has_unfinished() and engine.pages.num_free == engine.pages.num_pages


BYTES = {
    "stray": (["<0x0A>", "<0x80>", "▁the", "▁the"], "\n\ufffd the the"),
    "two-halves": (["▁the", "<0x0A>", "<0x22>", "<0xC3>", "<0xC3>", "▁the", "b", "<0x0A>"], 'the\n"\ufffd\ufffd theb\n'),
    "twice": (["<0x0A>", "<0xE2>", "a", "<0x22>", "<0xFF>", "<0x22>", "b"], '\n\ufffda"\ufffd\ufffdb'),
    "a-character": (["<0x0A>", "<0xC3>", "<0xA9>", "▁the"], "\n\u00e9 the"),
}


@pytest.mark.parametrize("pieces, text", BYTES.values(), ids=BYTES)
def test_bytes_that_are_no_character_are_decoded(pieces, text):
    """A byte that fits nowhere changes how those before it are decoded, which have been told: they stand, and what follows is as the tokenizer has it."""
    tokenizer = byte_fallback_tokenizer()
    tokens = [tokenizer.backend.token_to_id(piece) for piece in pieces]
    request = Request(0, None, [1], SamplingParams(max_tokens=100), 0, limit=len(tokens), tokenizer=tokenizer, eos_token_ids=frozenset())
    told = ""
    for token in tokens:
        request.append([token])
        told += request.delta().text
    assert (told, request.text(), request.finish_reason) == (text, text, "length")


def test_no_token_ends_the_requests_of_others():
    """Tokens at random, bytes of no character among them: every answer comes, with the text that was streamed."""
    tokenizer, target = byte_fallback_tokenizer(), tiny_target("llama")
    odd = range(3, 13)
    params = [SamplingParams(temperature=5.0, seed=seed, max_tokens=40, ignore_eos=True, logit_bias=dict.fromkeys(odd, 4.0)) for seed in range(6)]
    engine = make_engine(target, random_drafter(target), tokenizer)
    outputs = engine.generate([PROMPT] * 6, params)
    assert all(any(a in odd and b in odd for a, b in zip(output.token_ids, output.token_ids[1:])) for output in outputs)
    for output, param in zip(outputs, params):
        assert len(output.token_ids) == 40
        plain = make_engine(target, None, tokenizer)
        assert output.text == plain.generate([PROMPT], param)[0].text == "".join(piece.text for piece in plain.stream(PROMPT, param))


def test_two_streams_at_once():
    engine = engines()["speculative"]
    params = SamplingParams(**GREEDY, max_tokens=25, ignore_eos=True)
    other = random_tokens(70, 4)
    expected = [plain_tokens(tiny_target("llama"), prompt, params) for prompt in (PROMPT, other)]
    first, second = engine.stream(PROMPT, params), engine.stream(other, params)
    tokens = [list(next(first).token_ids), list(next(second).token_ids)]
    for piece in first:
        tokens[0] += piece.token_ids
    for piece in second:
        tokens[1] += piece.token_ids
    assert tokens == expected


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("tokens", [1, 5, 25])
def test_a_stream_has_all_pieces_of_an_answer_that_others_have_carried_to_its_end(tokens, captured):
    """Whoever advances the engine, step, generate or another stream, takes nothing from a stream that waits: not its tokens, not its text, not its end."""
    params = SamplingParams(**GREEDY, max_tokens=tokens, ignore_eos=True)
    longer = SamplingParams(**GREEDY, max_tokens=60, ignore_eos=True)
    engine = Engine(tiny_target("llama"), None, tiny_tokenizer(), EagleConfig(max_model_len=200), graph_api=CountingGraphs() if captured else None)
    expected = engine.generate([PROMPT], params)[0]
    others = {"generate": lambda: engine.generate([random_tokens(71, 4)], longer), "stream": lambda: list(engine.stream(random_tokens(71, 4), longer)), "step": lambda: [engine.step() for _ in range(70)]}
    for name, advance in others.items():
        stream = engine.stream(PROMPT, params)
        pieces = [next(stream)]
        advance()
        pieces += stream
        assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids, name
        assert "".join(piece.text for piece in pieces) == expected.text, name
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1) and pieces[-1].finish_reason == "length", name


def test_a_stream_says_what_went_wrong_while_others_ran():
    """The logits become unusable in a step that somebody else runs."""
    target = tiny_target("llama")
    engine = make_engine(target, None)
    stream = engine.stream(PROMPT, SamplingParams(**GREEDY, max_tokens=50))
    next(stream)
    with torch.inference_mode():
        engine.state.target_cache[:] = float("nan")
    engine.step()
    with pytest.raises(EagleError, match="not usable"):
        list(stream)


def test_requests_of_the_caller_survive_generate_and_stream():
    """A serving loop's requests go on while generate or stream drives the engine; their outputs come with the next step."""
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target))
    params = SamplingParams(**GREEDY, max_tokens=6)
    first = engine.add_request(PROMPT, params)
    engine.generate([random_tokens(80, 4)], SamplingParams(**GREEDY, max_tokens=40))
    second = engine.add_request(PROMPT, params)
    list(engine.stream(random_tokens(81, 4), SamplingParams(**GREEDY, max_tokens=40)))
    outputs = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id] = output.token_ids
    assert outputs == dict.fromkeys((first, second), plain_tokens(target, PROMPT, params))


def test_stats_add_up():
    engine = engines(PROMPT + ANSWER)["speculative"]
    output = engine.generate([PROMPT], SamplingParams(**PARAMS, max_tokens=40))[0]
    stats = output.stats
    assert stats.acceptance_length == pytest.approx(39 / stats.steps)
    assert 1.0 + sum(stats.acceptance_by_depth) == pytest.approx(stats.acceptance_length)
    assert stats.acceptance_by_depth == sorted(stats.acceptance_by_depth, reverse=True)
    assert set(stats.time_per_phase) == {"prefill", "draft", "verify", "sample", "compact"} and all(seconds > 0 for seconds in stats.time_per_phase.values())


def test_memory_is_told_by_purpose():
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target))
    told = engine.memory_bytes
    cache = engine.state.target_cache
    assert told["kv_cache"] == cache.nbytes + engine.state.draft_cache.nbytes
    assert told["target"] == engine.models.target.num_bytes > 0
    assert 0 < told["state"] < 1 << 20 and told["drafter"] == engine.models.drafter.num_bytes > 0
