"""Faults that were reported about engines that run EAGLE, as catalogued in README.md: penalties, biases, log-probabilities and grammars over a verified tree. The number in a test's name is that of catalogue B."""

import itertools
import json
import re

import pytest
import torch
from eagle_engine import SamplingParams, StructuredOutputs
from test_step_graphs import graphed
from tiny_engines import TREES, bigram_drafter, make_engine, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import VOCAB_SIZE, hf_logits, random_tokens, tiny_model
from tiny_tokenizers import EOS, character_tokenizer, json_tokenizer

GREEDY = dict(temperature=0.0)
PROMPT = random_tokens(700, 7)


@pytest.mark.parametrize("tree", TREES)
def test_b02_a_bias_reaches_every_node(tree):
    """A token that is pushed is all there is, one that is banned never comes: drafts of the banned one, which the drafter goes on making, are refused."""
    target = tiny_target("llama")
    free = plain_tokens(target, PROMPT, SamplingParams(**GREEDY, max_tokens=20))
    banned = {token: -100.0 for token in free[:3]}
    drafter = oracle_drafter(target, PROMPT + free)
    pushed, without = make_engine(target, drafter, **TREES[tree]).generate([PROMPT] * 2, [SamplingParams(temperature=1.0, seed=1, max_tokens=20, logit_bias=bias) for bias in ({40: 100.0}, banned)])
    assert pushed.token_ids == [40] * 20
    assert not set(without.token_ids) & set(banned) and without.token_ids == plain_tokens(target, PROMPT, SamplingParams(temperature=1.0, seed=1, max_tokens=20, logit_bias=banned))


PENALTIES = {"repetition": dict(repetition_penalty=2.0), "presence": dict(presence_penalty=2.0), "frequency": dict(frequency_penalty=1.5), "all": dict(repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.7)}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_b31_penalties_count_the_tokens_of_the_run_they_stand_in(penalty):
    """Each token penalised by prompt and answer up to it, by a loop over the logits of transformers: runs of drafts that are accepted whole, and drafts of a text without penalties, give that text."""
    values = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0) | PENALTIES[penalty]
    target, model, answer = tiny_target("llama"), tiny_model("llama"), []
    for _ in range(24):
        x, counts = hf_logits(model, PROMPT + answer)[-1], torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=VOCAB_SIZE)
        seen = counts.bool() | (torch.arange(VOCAB_SIZE)[:, None] == torch.tensor(PROMPT)).any(1)
        x = torch.where(seen, torch.where(x > 0, x / values["repetition_penalty"], x * values["repetition_penalty"]), x)
        answer.append(int((x - values["frequency_penalty"] * counts - values["presence_penalty"] * (counts > 0)).argmax()))
    params = SamplingParams(**GREEDY, max_tokens=24, **PENALTIES[penalty])
    free = plain_tokens(target, PROMPT, SamplingParams(**GREEDY, max_tokens=24))
    assert answer != free
    for drafter in (None, oracle_drafter(target, PROMPT + answer), oracle_drafter(target, PROMPT + free), bigram_drafter(target, [free])):
        output = make_engine(target, drafter, **TREES["dynamic"]).generate(PROMPT, params)[0]
        assert output.token_ids == answer
    steps = make_engine(target, oracle_drafter(target, PROMPT + answer), **TREES["dynamic"]).generate(PROMPT, params)[0].stats.steps
    assert steps == 5  # 23 tokens behind the first, five a step


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_b20_log_probabilities_of_every_token_of_a_run(captured):
    """One entry for each token, accepted drafts among them, each the target's own by transformers: none left out, none 0, none that of another place or of another step."""
    target, model = tiny_target("llama"), tiny_model("llama")
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=20, logprobs=3, prompt_logprobs=1) for seed in range(2)]
    texts = [PROMPT + plain_tokens(target, PROMPT, param) for param in params]
    drafter = bigram_drafter(target, texts)
    engine = graphed(target, drafter, **TREES["dynamic"])[0] if captured else make_engine(target, drafter, **TREES["dynamic"])
    for text, output in zip(texts, engine.generate([PROMPT] * 2, params)):
        answer = output.outputs[0]
        assert PROMPT + answer.token_ids == text and output.stats.acceptance_length > 1.5
        expected = hf_logits(model, text).double().log_softmax(-1)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT) and len(answer.logprobs) == 20
        for position, place in enumerate([*output.prompt_logprobs, *answer.logprobs][1:], start=1):
            row, token = expected[position - 1], text[position]
            assert place[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert place[token].rank == int((row > row[token]).sum()) + 1
            best = row.topk(3 if position >= len(PROMPT) else 1).indices.tolist()
            assert set(place) == {token, *best}
        assert answer.cumulative_logprob == pytest.approx(sum(place[token].logprob for place, token in zip(answer.logprobs, answer.token_ids)))


def structured(drafter, wanted: StructuredOutputs, *, eos: tuple[int, ...] = (EOS,), count: int = 1, tokenizer=None, **options) -> list:
    engine = make_engine(tiny_target("llama"), drafter, tokenizer or character_tokenizer(), eos=eos, **options)
    return engine.generate([PROMPT] * count, [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs=wanted) for seed in range(count)])


@pytest.mark.parametrize("eos", [(EOS,), ()], ids=["end-token", "no-end-token"])
def test_b18_drafts_behind_the_end_of_a_grammar_do_no_harm(eos):
    """The grammar ends at every depth of an accepted run, and the drafter drafts on: the answer is the whole text and stops there."""
    tokenizer = character_tokenizer()
    for length, depth in itertools.product(range(1, 7), (1, 4)):
        text = "abcdef"[:length]
        ids = tokenizer.encode(text, add_special_tokens=False)
        drafter = oracle_drafter(tiny_target("llama"), PROMPT + ids + list(eos) + ids + ids)
        (output,) = structured(drafter, StructuredOutputs(choice=[text]), eos=eos, tree="chain", max_depth=depth)
        assert (output.text, output.finish_reason, output.error) == (text, "stop", None)
        assert output.token_ids == ids + list(eos)


@pytest.mark.parametrize("tree", TREES)
def test_b19_the_place_in_a_grammar_is_that_of_the_text(tree):
    """Four answers at once, in one grammar and each at its own place, over steps that accept some drafts and refuse others: every text is one of the grammar, and that of plain decoding."""
    wanted = StructuredOutputs(regex="(a|b|cd){3,8}[xy]=[0-9]{1,3};")
    expected = structured(None, wanted, count=4)
    drafter = bigram_drafter(tiny_target("llama"), [PROMPT + output.token_ids for output in expected])
    outputs = structured(drafter, wanted, count=4, **TREES[tree])
    assert [(output.text, output.token_ids, output.finish_reason) for output in outputs] == [(output.text, output.token_ids, "stop") for output in expected]
    assert all(re.fullmatch("(a|b|cd){3,8}[xy]=[0-9]{1,3};", output.text) for output in outputs) and len({output.text for output in outputs}) > 2
    assert sum(output.stats.acceptance_length for output in outputs) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b42_a_grammar_at_temperature_zero_ends_like_plain_decoding(temperature):
    """JSON, byte by byte and in pieces of several characters: the same text with and without a drafter, no error behind its end, and what comes is JSON."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "boolean"}}, "required": ["a", "b"], "additionalProperties": False}
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=60, structured_outputs=StructuredOutputs(json=schema))
    target, tokenizer = tiny_target("llama"), json_tokenizer()
    expected = make_engine(target, None, tokenizer, eos=(EOS,)).generate(PROMPT, params)[0]
    for drafter in (random_drafter(target), bigram_drafter(target, [PROMPT + expected.token_ids]), oracle_drafter(target, PROMPT + expected.token_ids)):
        output = make_engine(target, drafter, tokenizer, eos=(EOS,), **TREES["dynamic"]).generate(PROMPT, params)[0]
        assert (output.text, output.token_ids, output.finish_reason, output.error) == (expected.text, expected.token_ids, expected.finish_reason, None)
    assert expected.finish_reason == "stop" and set(json.loads(expected.text)) == {"a", "b"}
