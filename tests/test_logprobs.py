"""Log-probabilities: those of plain decoding, bit for bit; those of torch, nearly. And several answers to one prompt."""

import json
import math
from dataclasses import replace
from functools import cache

import eagle_engine.token_logprobs
import pytest
import torch
from eagle_engine import CompletionOutput, EagleError, Logprob, RequestOutput, SamplingParams
from eagle_engine.cli.output_json import output_as_json
from eagle_engine.logits_processing import make_processor
from eagle_engine.structured_outputs import Grammars
from eagle_engine.token_logprobs import PIECE, prompt_logprobs, token_logprobs
from eagle_kernels import reference
from tiny_engines import TREES, bigram_drafter, make_engine, oracle_drafter, random_drafter, tiny_target
from tiny_targets import VOCAB_SIZE, empty_cache, hf_logits, prefill, random_tokens, save_directory
from tiny_tokenizers import EOS, character_tokenizer

PROMPT = random_tokens(40, 8)
LENGTH = 24
SAMPLING = {"greedy": dict(temperature=0.0), "sampled": dict(temperature=1.4, seed=5), "penalised": dict(temperature=1.4, seed=5, repetition_penalty=1.5, logit_bias={30: 8.0}, top_k=10)}


def params_of(sampling: str, **options) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=LENGTH, ignore_eos=True, logprobs=4) | SAMPLING[sampling] | options))


def engine_of(drafter, **options):
    return make_engine(tiny_target("llama"), drafter, character_tokenizer(), **({"eos": (EOS,)} | options))


@cache
def plain_output(sampling: str) -> CompletionOutput:
    return engine_of(None).generate([PROMPT], params_of(sampling))[0].outputs[0]


def check_against_torch(logits: torch.Tensor, tokens: list[int], found: list[dict[int, Logprob]], count: int) -> None:
    """logits [R, V]: what `tokens` were drawn from."""
    expected = logits.double().log_softmax(dim=1)
    assert len(found) == len(tokens)
    for row, token, place in zip(expected, tokens, found):
        assert next(iter(place)) == token  # the token that stands there comes first
        order = row.sort(descending=True, stable=True).indices.tolist()
        best = order[:count]
        assert list(place) == [token] + [other for other in best if other != token]
        for other, of in place.items():
            assert of.rank == order.index(other) + 1
            assert of.logprob == pytest.approx(row[other].item(), abs=1e-5)
            assert of.decoded_token == character_tokenizer().decode([other], skip_special_tokens=False)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_plain_logprobs_are_those_of_torch(sampling):
    """Of the logits before penalties, bias, temperature and filters: a whole forward over the answer."""
    target, output = tiny_target("llama"), plain_output(sampling)
    logits = target.logits(prefill(target, empty_cache(target.config), PROMPT + output.token_ids))[len(PROMPT) - 1 : -1]
    check_against_torch(logits, output.token_ids, output.logprobs, 4)
    assert output.cumulative_logprob == sum(place[token].logprob for place, token in zip(output.logprobs, output.token_ids)) < 0


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("tree", TREES)
def test_speculative_equals_plain_bit_for_bit(tree, sampling):
    target, expected = tiny_target("llama"), plain_output(sampling)
    for drafter in (random_drafter(target), bigram_drafter(target, [PROMPT + expected.token_ids]), oracle_drafter(target, PROMPT + expected.token_ids, ranks=[0, 1, 0])):
        output = engine_of(drafter, **TREES[tree]).generate([PROMPT], params_of(sampling))[0].outputs[0]
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs and output.cumulative_logprob == expected.cumulative_logprob
    assert output.stats.acceptance_length > 1.5


@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("ending", ["stop token", "end token", "stop string", "limit"])
def test_what_is_cut_off_the_answer_is_cut_off_its_logprobs(ending, at):
    """At every place of an accepted run."""
    target, expected = tiny_target("llama"), plain_output("sampled")
    token = expected.token_ids[at]
    end = expected.token_ids.index(token) + 1
    options = {
        "stop token": dict(stop_token_ids=[token]), "end token": dict(ignore_eos=False), "stop string": dict(stop=character_tokenizer().decode([token])), "limit": dict(max_tokens=end),
    }[ending]  # fmt: skip
    drafter = oracle_drafter(target, PROMPT + expected.token_ids)
    engine = engine_of(drafter, eos=(token,) if ending == "end token" else (EOS,))
    output = engine.generate([PROMPT], params_of("sampled", **options))[0].outputs[0]
    assert output.token_ids == expected.token_ids[:end]
    assert output.logprobs == expected.logprobs[:end]
    assert output.cumulative_logprob == sum(place[token].logprob for place, token in zip(expected.logprobs[:end], output.token_ids))
    pieces = list(engine.stream(PROMPT, params_of("sampled", **options)))
    assert [place for piece in pieces for place in piece.logprobs] == output.logprobs
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_number_of_alternatives(count):
    output = engine_of(None).generate([PROMPT], params_of("sampled", logprobs=count))[0].outputs[0]
    likely = plain_output("sampled")
    for place, token, four in zip(output.logprobs, output.token_ids, likely.logprobs):
        assert next(iter(place)) == token and len(place) in (count, count + 1)
        assert place[token] == four[token]
    assert all(len(place) == 1 for place in output.logprobs) == (count == 0)


def test_nobody_pays_who_did_not_ask():
    output = engine_of(random_drafter(tiny_target("llama"))).generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=5))[0]
    assert output.prompt_logprobs is None and output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    assert all(piece.logprobs is None for piece in engine_of(None).stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=5)))


def test_logprobs_of_a_batch_are_those_of_single_requests():
    target = tiny_target("llama")
    params = [params_of("sampled", seed=i, max_tokens=4 + 4 * (i % 3), logprobs=i % 4 if i % 3 else None, prompt_logprobs=2 if i % 2 else None) for i in range(7)]
    prompts = [random_tokens(70 + i, 2 + 3 * i) for i in range(7)]
    expected = [engine_of(None).generate([prompt], param)[0] for prompt, param in zip(prompts, params)]
    drafter = bigram_drafter(target, [prompt + output.token_ids for prompt, output in zip(prompts, expected)])
    for output, alone in zip(engine_of(drafter, max_batch_size=3).generate(prompts, params), expected):
        assert output.token_ids == alone.token_ids
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs and output.prompt_logprobs == alone.prompt_logprobs


def test_prompt_logprobs_do_not_depend_on_what_is_cached():
    """Rows that are found have no logits, so all of such a prompt is run; what it leaves is found by others all the same."""
    prompt = random_tokens(44, 40)
    engine, asks = engine_of(random_drafter(tiny_target("llama"))), SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2)
    cold = engine_of(None).generate([prompt], asks)[0]
    engine.generate([prompt], replace(asks, prompt_logprobs=None))
    warm, after = engine.generate([prompt], asks)[0], engine.generate([prompt], replace(asks, prompt_logprobs=None))[0]
    assert len(warm.prompt_logprobs) == 40 and warm.prompt_logprobs == cold.prompt_logprobs and warm.token_ids == after.token_ids == cold.token_ids
    assert warm.stats.num_cached_tokens == 0 < after.stats.num_cached_tokens


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("length", [1, 2, PIECE + 1, 150])
def test_prompt_logprobs_are_those_of_transformers(length, chunk, tmp_path):
    """Over chunks of the prefill and pieces of logits; the bits do not depend on the chunks."""
    target = tiny_target("llama")
    model = save_directory(tmp_path, "llama")
    prompt = random_tokens(41, length)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    output = engine_of(random_drafter(target), prefill_chunk=chunk).generate([prompt], params)[0]
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == length
    if length > 1:
        expected = hf_logits(model, prompt)[:-1].double().log_softmax(dim=1)
        for row, token, place in zip(expected, prompt[1:], output.prompt_logprobs[1:]):
            assert next(iter(place)) == token and len(place) in (3, 4)
            assert all(of.logprob == pytest.approx(row[other].item(), abs=1e-4) for other, of in place.items())
            assert sorted(of.rank for of in place.values())[:3] == [1, 2, 3]
        check_against_torch(target.logits(prefill(target, empty_cache(target.config, rows=160), prompt))[:-1], prompt[1:], output.prompt_logprobs[1:], 3)
    assert output.prompt_logprobs == engine_of(None, prefill_chunk=64).generate([prompt], params)[0].prompt_logprobs


def test_rows_do_not_depend_on_their_neighbours():
    logits = 4 * torch.randn(33, VOCAB_SIZE)
    tokens = torch.randint(VOCAB_SIZE, (33,)).tolist()
    together = token_logprobs(logits, tokens, 5, None)
    assert together == [place for i, token in enumerate(tokens) for place in token_logprobs(logits[i : i + 1], [token], 5, None)]
    assert prompt_logprobs(lambda rows: rows, torch.cat((logits, logits, logits)), tokens * 3, 5, None) == together * 3


def test_ties_infinities_and_more_alternatives_than_tokens():
    """Of equal logits the smaller id is the more likely; what cannot be has -inf; what must be has 0."""
    rows = torch.tensor([[1.0, 2.0, 2.0, 2.0], [-math.inf, 0.0, -math.inf, -math.inf], [math.inf, 0.0, math.inf, 1.0]])
    ties, certain, infinite = token_logprobs(rows, [2, 0, 2], 20, None)
    assert list(ties) == [2, 1, 3, 0] and [ties[token].rank for token in (1, 2, 3, 0)] == [1, 2, 3, 4]
    assert ties[1].logprob == ties[2].logprob == ties[3].logprob == pytest.approx(2 - math.log(3 * math.exp(2) + math.e))
    assert certain[1] == Logprob(0.0, 1, None) and certain[0] == Logprob(-math.inf, 2, None)
    assert infinite[2] == Logprob(0.0, 2, None) and infinite[0].logprob == 0.0 and infinite[1] == Logprob(-math.inf, 4, None)
    assert token_logprobs(rows[:0], [], 3, None) == []


# n


@pytest.mark.parametrize("seed", [3, 2**63 - 2, -1])
def test_answer_i_is_that_of_seed_plus_i(seed):
    target = tiny_target("llama")
    several = dict(temperature=1.3, max_tokens=10, ignore_eos=True, logprobs=1, prompt_logprobs=0, frequency_penalty=0.5)
    engine = engine_of(random_drafter(target), max_batch_size=3)
    output, other = engine.generate([PROMPT, PROMPT[:3]], [SamplingParams(**several, seed=seed, n=5), SamplingParams(temperature=0.0, max_tokens=3)])
    singles = [engine_of(None).generate([PROMPT], SamplingParams(**several, seed=(seed + i + 2**63) % 2**64 - 2**63))[0] for i in range(5)]
    assert [(answer.index, answer.token_ids, answer.logprobs) for answer in output.outputs] == [(i, single.token_ids, single.outputs[0].logprobs) for i, single in enumerate(singles)]
    assert output.prompt_logprobs == singles[0].prompt_logprobs and len({tuple(answer.token_ids) for answer in output.outputs}) == 5
    assert (output.token_ids, output.text, output.finish_reason) == (singles[0].token_ids, singles[0].text, "length") and len(other.outputs) == 1
    assert engine.pages.num_free == engine.pages.num_pages


def test_answers_without_a_seed_differ():
    answers = engine_of(None).generate([PROMPT], SamplingParams(temperature=2.0, max_tokens=10, n=3))[0].outputs
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_a_request_is_delivered_once_when_all_its_answers_have_ended():
    engine = engine_of(random_drafter(tiny_target("llama")), max_batch_size=2)
    # One token ends some answers early.
    ends = engine_of(None).generate([PROMPT], SamplingParams(temperature=1.5, seed=8, max_tokens=12, ignore_eos=True))[0].token_ids[2]
    params = SamplingParams(temperature=1.5, seed=8, max_tokens=12, ignore_eos=True, stop_token_ids=[ends], n=3)
    request_id = engine.add_request(PROMPT, params)
    delivered = []
    while engine.has_unfinished():
        delivered += engine.step()
    assert [output.request_id for output in delivered] == [request_id]
    assert [answer.index for answer in delivered[0].outputs] == [0, 1, 2]
    assert len(delivered[0].outputs[0].token_ids) < 12 and {answer.finish_reason for answer in delivered[0].outputs} <= {"stop", "length"}


def test_abort_ends_all_answers():
    engine = engine_of(random_drafter(tiny_target("llama")), max_batch_size=2)
    first = engine.add_request(PROMPT, SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True, n=4))
    second = engine.add_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    engine.step()
    aborted = engine.abort(first)
    assert [answer.finish_reason for answer in aborted.outputs] == ["abort"] * 4
    assert [len(answer.token_ids) > 0 for answer in aborted.outputs] == [True, True, False, False]
    assert engine.abort(first) is None
    delivered = []
    while engine.has_unfinished():
        delivered += engine.step()
    assert [output.request_id for output in delivered] == [second] and engine.pages.num_free == engine.pages.num_pages


def test_an_answer_that_fails_keeps_its_error():
    """Two letters are allowed, and no word of the answer that begins with the first of them."""
    tokenizer = character_tokenizer()
    a, b = tokenizer.encode("ab")
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=3, n=8, allowed_token_ids=[a, b], bad_words=["aa", "ab"])
    output = engine_of(random_drafter(tiny_target("llama"))).generate([PROMPT], params)[0]
    failed = [answer for answer in output.outputs if answer.finish_reason == "error"]
    assert 0 < len(failed) < 8
    for answer in output.outputs:
        assert (answer.finish_reason == "error") == (a in answer.token_ids[:-1] or len(answer.token_ids) < 3)
        assert ("ban every token" in (answer.error or "")) == (answer.finish_reason == "error")


def test_a_stream_has_one_answer():
    with pytest.raises(EagleError, match="n: a stream has one answer"):
        next(engine_of(None).stream(PROMPT, SamplingParams(n=2)))


def test_outputs_as_json():
    """Infinite numbers are null; nothing is there that was not asked for; several answers stand beside the first."""
    place = {5: Logprob(-0.5, 1, "c"), 7: Logprob(-math.inf, 2, "e")}
    answer = CompletionOutput(0, "c", [5], "length", logprobs=[place], cumulative_logprob=-0.5)
    shown = json.loads(json.dumps(output_as_json(RequestOutput(3, "p", [1], [answer])), allow_nan=False))
    assert shown["token_ids"] == [5] and shown["request_id"] == 3 and shown["cumulative_logprob"] == -0.5 and "answers" not in shown
    assert shown["logprobs"] == [[{"token_id": 5, "token": "c", "logprob": -0.5, "rank": 1}, {"token_id": 7, "token": "e", "logprob": None, "rank": 2}]]
    several = output_as_json(RequestOutput(3, "p", [1], [CompletionOutput(i, str(i), [i], "stop") for i in range(2)]))
    assert "logprobs" not in several and several["text"] == "0" and [one["text"] for one in several["answers"]] == ["0", "1"]


def test_what_is_computed_again_is_not_told_twice():
    """A request that lost its cache runs its prompt and its answer again: the log-probabilities before stay, those of the same places are replaced."""
    params = SamplingParams(logprobs=1, prompt_logprobs=1, max_tokens=9)
    processor = make_processor(PROMPT, params, VOCAB_SIZE, [], Grammars(None, VOCAB_SIZE, ()), None, torch.device("cpu"))
    rows = torch.randn(8, VOCAB_SIZE)
    for start, end in ((0, 3), (0, 8), (3, 8), (6, 8), (0, 1)):
        processor.record_prompt(lambda features: features, rows[start:end], start)
    assert processor.prompt_logprobs == token_logprobs(rows[:7], PROMPT[1:], 1, None)
    processor.record(rows[:3], [4, 5, 6])
    processor.update([4, 5])
    processor.record(rows[2:5], [6, 7, -1])
    assert processor.logprobs == token_logprobs(rows[:4], [4, 5, 6, 7], 1, None)


def test_tiles_of_the_vocabulary_are_merged(monkeypatch):
    """As on CUDA, where the statistics come per tile, the last of them shorter than the number of alternatives."""
    logits = 5 * torch.randn(6, VOCAB_SIZE)
    logits[0, :16], logits[1, 3:40], logits[2, 30:] = -math.inf, logits[1, 3], -math.inf
    tokens = [20, 3, 5, 82, 0, 40]
    whole = token_logprobs(logits, tokens, 7, None)
    monkeypatch.setattr(eagle_engine.token_logprobs, "logits_topk", lambda rows, top_k: reference.logits_topk(rows, top_k, tile=16))
    for place, expected in zip(token_logprobs(logits, tokens, 7, None), whole):
        assert list(place) == list(expected)
        for token, of in place.items():
            assert of.rank == expected[token].rank and of.logprob == pytest.approx(expected[token].logprob, abs=1e-6)
