"""Answers of a given form: they have it, they end with it, and they are those of plain decoding."""

import itertools
import json
import re
from functools import cache

import pytest
from eagle_engine import EagleError, SamplingParams, StructuredOutputs, logits_processing
from eagle_engine.request import Request
from eagle_engine.structured_outputs import GrammarState
from test_step_graphs import CountingGraphs
from tiny_engines import TREES, bigram_drafter, make_engine, oracle_drafter, random_drafter, tiny_target
from tiny_targets import random_tokens
from tiny_tokenizers import EOS, json_tokenizer

PROMPT = random_tokens(40, 8)
SAMPLING = {"greedy": dict(temperature=0.0), "sampled": dict(temperature=1.5, seed=11)}
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["a", "ok", "list"],
    "properties": {
        "a": {"type": "string", "pattern": "^[a-cé]{2,4}$"}, "ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "list": {"type": "array", "items": {"enum": ["é", "abc", 12, None]}, "minItems": 2, "maxItems": 4},
    },
}  # fmt: skip


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "json-text": StructuredOutputs(json=json.dumps({"enum": ["true", 12, None, {"abc": [False]}]})),
    "regex": StructuredOutputs(regex=r"(ab|cé|[d-f]+){3,5}: [0-9]{2,6}(é|x)"),
    "choice": StructuredOutputs(choice=["abcabé", "true", 'x"y\\z', "é"]),
    "lark": StructuredOutputs(grammar='start: sum\nsum: NUMBER ("-" sum)? | "[" sum "]"\nNUMBER: /[0-9]{1,3}/'),
    "gbnf": StructuredOutputs(grammar='root ::= "{" pair ("," pair)* "}"\npair ::= [a-e] ":" [0-9] [0-9]?'),
}


def accepts(form: str, text: str) -> bool:
    """Whether a text has the form, without the library that made it so."""
    if form == "json":
        value = json.loads(text)
        strings = all(item in ("é", "abc", 12, None) for item in value["list"]) and 2 <= len(value["list"]) <= 4
        return set(value) <= {"a", "ok", "n", "list"} and bool(re.fullmatch("[a-cé]{2,4}", value["a"])) and isinstance(value["ok"], bool) and strings and 0 <= value.get("n", 0) <= 99
    if form == "json-text":
        return json.loads(text) in ["true", 12, None, {"abc": [False]}]
    if form == "choice":
        return text in FORMS["choice"].choice
    if form == "lark":
        inner = text.replace("[", "").replace("]", "")
        return bool(re.fullmatch(r"[0-9]{1,3}(-[0-9]{1,3})*", inner)) and text.count("[") == text.count("]")
    return bool(re.fullmatch(FORMS["regex"].regex if form == "regex" else r"\{[a-e]:[0-9]{1,2}(,[a-e]:[0-9]{1,2})*\}", text))


def params_of(form: str, sampling: str, **options) -> SamplingParams:
    # White space and long sums are allowed without end, and this target likes both.
    likes = {json_tokenizer().backend.token_to_id(piece): bias for piece, bias in (("Ġ", -6.0), ("Ġ}", -6.0), ("-", -4.0), ("[", -4.0))}
    return SamplingParams(**(dict(max_tokens=120, structured_outputs=FORMS[form], logit_bias=likes) | SAMPLING[sampling] | options))


def engine_of(drafter, eos: tuple[int, ...] = (EOS,), **options):
    return make_engine(tiny_target("llama"), drafter, json_tokenizer(), eos=eos, **options)


@cache
def plain_answer(form: str, sampling: str):
    return engine_of(None).generate([PROMPT], params_of(form, sampling))[0]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("form", FORMS)
def test_answers_have_the_form_and_end_with_it(form, sampling):
    output = plain_answer(form, sampling)
    assert (output.finish_reason, output.stop_reason, output.error) == ("stop", None, None)
    assert output.token_ids[-1] == EOS and accepts(form, output.text), output.text


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("form", FORMS)
def test_speculative_equals_plain(form, tree, sampling):
    target, expected = tiny_target("llama"), plain_answer(form, sampling)
    for drafter in (random_drafter(target), bigram_drafter(target, [PROMPT + expected.token_ids]), oracle_drafter(target, PROMPT + expected.token_ids, ranks=[0, 0, 1, 0])):
        output = engine_of(drafter, **TREES[tree]).generate([PROMPT], params_of(form, sampling))[0]
        assert (output.token_ids, output.text, output.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
    assert output.stats.acceptance_length > 1.5 or len(expected.token_ids) < 5


@pytest.mark.parametrize("form", ["json", "regex", "gbnf"])
def test_grammars_that_are_frozen_over_the_tree_are_noticed(form, monkeypatch):
    """A planted fault: every node is given what the grammar allows after the root."""
    right = GrammarState.allowed
    monkeypatch.setattr(GrammarState, "allowed", lambda self, tokens, parent: right(self, [-1], [-1]).expand(len(tokens), -1))
    expected = plain_answer(form, "greedy")
    drafter = oracle_drafter(tiny_target("llama"), PROMPT + expected.token_ids)
    assert engine_of(drafter).generate([PROMPT], params_of(form, "greedy"))[0].token_ids != expected.token_ids


@pytest.mark.parametrize("ending", ["end token", "no end token", "limit"])
@pytest.mark.parametrize("depth", range(1, 5))
def test_a_grammar_ends_inside_an_accepted_run(depth, ending):
    """The oracle knows what follows an answer without a grammar; `depth` shifts where in a run the form is complete."""
    target = tiny_target("llama")
    form = StructuredOutputs(regex=f"[a-z]{{{8 + depth}}}:")
    eos = () if ending == "no end token" else (EOS,)
    params = SamplingParams(temperature=0.0, max_tokens=9 + depth if ending == "limit" else 40, structured_outputs=form)
    single = {json_tokenizer().backend.token_to_id(piece): -100.0 for piece in ("ab", "abc", "true", "false", "null")}
    params = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, structured_outputs=form, logit_bias=single)
    expected = engine_of(None, eos).generate([PROMPT], params)[0]
    assert len(expected.token_ids) == 9 + depth + (ending == "end token") and expected.text.endswith(":")
    assert expected.finish_reason == ("length" if ending == "limit" else "stop")
    drafter = oracle_drafter(target, PROMPT + expected.token_ids + [5] * 20)
    for tree in TREES.values():
        output = engine_of(drafter, eos, **tree).generate([PROMPT], params)[0]
        assert (output.token_ids, output.text, output.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)
        assert output.stats.acceptance_length > 2


def test_without_an_end_token_the_answer_goes_on_while_it_may():
    """[a-b]+ is complete after each letter and never over: only max_tokens ends it."""
    params = SamplingParams(temperature=0.0, max_tokens=17, structured_outputs=StructuredOutputs(regex="[a-b]+"))
    for drafter in (None, random_drafter(tiny_target("llama"))):
        output = engine_of(drafter, ()).generate([PROMPT], params)[0]
        assert output.finish_reason == "length" and len(output.token_ids) == 17 and set(output.text) <= set("ab")


def test_a_dead_end_ends_its_own_request_only():
    """No token has a byte of ж: the grammar can begin and not go on."""
    fine = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for regex, begin in (("aж", "a"), ("ж", "")):
        stuck = SamplingParams(temperature=0.0, max_tokens=6, structured_outputs=StructuredOutputs(regex=regex))
        for drafter in (None, oracle_drafter(tiny_target("llama"), PROMPT + [json_tokenizer().backend.token_to_id("a"), 0, 5])):
            outputs = engine_of(drafter).generate([PROMPT] * 3, [fine, stuck, fine])
            assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
            assert outputs[1].error == f"structured_outputs: the grammar has come to a dead end at position {len(PROMPT) + len(begin)}: no token of the vocabulary continues it"
            assert outputs[1].text == begin and outputs[0].token_ids == outputs[2].token_ids


def test_a_stream_has_what_came_before_an_error():
    """Also where the same step drew it and came to the dead end."""
    a = json_tokenizer().backend.token_to_id("a")
    stuck = SamplingParams(temperature=0.0, max_tokens=9, structured_outputs=StructuredOutputs(regex="a{5}ж"), logit_bias={a: 100.0}, logprobs=0)
    for drafter, steps in ((None, 5), (oracle_drafter(tiny_target("llama"), PROMPT + [a] * 9), 1)):
        engine, pieces = engine_of(drafter, tree="chain", max_depth=4), []
        expected = engine.generate([PROMPT], stuck)[0].outputs[0]
        with pytest.raises(EagleError, match="dead end"):
            for piece in engine.stream(PROMPT, stuck):
                pieces.append(piece)
        assert len(pieces) <= steps and all(piece.finish_reason is None for piece in pieces)
        assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids == [a] * 5
        assert "".join(piece.text for piece in pieces) == expected.text == "a" * 5
        assert [place for piece in pieces for place in piece.logprobs] == expected.logprobs


@pytest.mark.parametrize(
    "form, message",
    [
        (StructuredOutputs(regex="(a"), "regex: .*unclosed group$"), (StructuredOutputs(json={"type": "nope"}), "json: .*Invalid type: nope$"),
        (StructuredOutputs(json={"type": "array", "contains": {}}), "json: .*contains"), (StructuredOutputs(grammar='start: "a'), "grammar: .*lexer error"),
        (StructuredOutputs(grammar='root ::= "a'), "grammar: Unexpected end of input at line 1"), (StructuredOutputs(grammar="start: other"), "grammar: .*other"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_grammar_ends_its_own_request_only(form, message):
    fine = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine = engine_of(random_drafter(tiny_target("llama")))
    bad, good = engine.generate([PROMPT] * 2, [SamplingParams(structured_outputs=form), fine])
    assert bad.finish_reason == "error" and re.match(f"structured_outputs: {message}", bad.error), bad.error
    assert good.finish_reason == "length"
    with pytest.raises(EagleError, match="structured_outputs"):
        engine.add_request(PROMPT, SamplingParams(structured_outputs=form))
    assert not engine.has_unfinished()


FAULTS = {  # where an exception comes from, and what it is told as
    "allowed": (GrammarState, "allowed", "structured_outputs: "), "take": (GrammarState, "take", "structured_outputs: "), "is_complete": (GrammarState, "is_complete", "structured_outputs: "),
    "logprobs": (logits_processing, "token_logprobs", "logprobs: "), "prompt_logprobs": (logits_processing, "prompt_logprobs", "prompt_logprobs: "), "tokenizer": (Request, "_decode_next", "the tokenizer cannot decode token "),
}  # fmt: skip


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("place", FAULTS)
def test_an_exception_out_of_a_grammar_or_a_tokenizer_ends_its_own_request_only(place, after, captured, monkeypatch):
    """A planted fault in one call of one request: it ends with an error, with what came before; the others have the answers that they have alone."""
    fine = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    hit = SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=StructuredOutputs(regex="[a-z]{30}"), logprobs=1, prompt_logprobs=0)
    drafter = random_drafter(tiny_target("llama"))
    expected, whole = engine_of(None).generate([PROMPT], fine)[0], engine_of(None).generate([PROMPT], hit)[0]
    owner, name, message = FAULTS[place]
    right, calls = getattr(owner, name), []

    def wrong(*args):
        if place == "tokenizer" and args[0].params is not hit:
            return right(*args)
        calls.append(1)
        if len(calls) == after + 1:
            raise RuntimeError("planted")
        return right(*args)

    monkeypatch.setattr(owner, name, wrong)
    engine = engine_of(drafter, () if place == "is_complete" else (EOS,), graph_api=CountingGraphs() if captured else None, prefill_chunk=1)
    outputs = engine.generate([PROMPT] * 3, [fine, hit, fine])
    assert outputs[1].finish_reason == "error" and outputs[1].error.startswith(message) and outputs[1].error.endswith("RuntimeError: planted")
    assert len(outputs[1].token_ids) < 30 and outputs[1].token_ids == whole.token_ids[: len(outputs[1].token_ids)]
    assert outputs[0].token_ids == outputs[2].token_ids == expected.token_ids
    assert engine.pages.num_held == 0 and not engine.has_unfinished()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(), "got none"), (dict(regex="a", choice=["b"]), "got regex, choice"), (dict(json="{"), "no JSON"), (dict(json="3"), "an object, got 3"), (dict(json={"a": {1}}), "no JSON"),
        (dict(regex=""), "regex: expected a non-empty string"), (dict(grammar=5), "grammar: expected"), (dict(choice=[]), "choice"), (dict(choice="ab"), "choice"), (dict(choice=["a", ""]), "choice"),
        (dict(regex="a\ud800"), "regex: half of a surrogate pair"), (dict(choice=["a", "\udc00"]), "choice: half of a surrogate pair"), (dict(grammar='start: "\ud800"'), "grammar: half of a surrogate pair"),
        (dict(json={"const": "\ud800"}), "json: half of a surrogate pair"), (dict(json='{"const": "\\ud800"}'), "json: half of a surrogate pair"), (dict(json=nested(100_000)), "json: expected a JSON schema"),
    ],
)  # fmt: skip
def test_bad_forms_are_named(options, message):
    with pytest.raises(EagleError, match=f"structured_outputs: .*{message}"):
        StructuredOutputs(**options)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("count", [1, 3000])
def test_a_choice_may_have_any_number_of_texts(count, sampling):
    choice = ["".join(letters) for letters in itertools.islice(itertools.product("abcdefghijklm", repeat=4), count)]
    output = engine_of(random_drafter(tiny_target("llama"))).generate([PROMPT], SamplingParams(**SAMPLING[sampling], max_tokens=10, structured_outputs=StructuredOutputs(choice=choice)))[0]
    assert output.finish_reason == "stop" and output.text in choice, output.error


@pytest.mark.parametrize("tree", TREES)
def test_forms_side_by_side(tree):
    """Forms of one batch, and requests without any, each as alone."""
    target = tiny_target("llama")
    params = [params_of(form, "sampled") for form in FORMS] + [SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)] * 2
    expected = [engine_of(None).generate([PROMPT], param)[0].token_ids for param in params]
    engine = engine_of(bigram_drafter(target, [PROMPT + answer for answer in expected]), **TREES[tree])
    assert [output.token_ids for output in engine.generate([PROMPT] * len(params), params)] == expected
