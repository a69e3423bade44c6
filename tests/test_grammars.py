"""What a grammar allows at every node of a tree, and the vocabulary that it is told."""

from functools import cache

import llguidance
import pytest
import torch
from eagle_engine import EagleError, SamplingParams, StructuredOutputs
from eagle_engine.structured_outputs import Grammars, byte_of_character, token_bytes
from eagle_engine.tokenizer import Tokenizer
from helpers import parents_strategy
from hypothesis import given
from hypothesis import strategies as st
from test_structured_outputs import FORMS, PROMPT, plain_answer
from tiny_engines import make_engine, tiny_target
from tiny_targets import VOCAB_SIZE
from tiny_tokenizers import EOS, json_tokenizer
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel


@given(data=st.data(), parents=parents_strategy(14))
def test_what_a_tree_is_allowed_is_what_its_paths_are_allowed(data, parents):
    """Any tree of any tokens at any place: where a node can be reached, what it is allowed is what a fresh grammar says after its path, and the walk leaves no trace."""
    grammars = all_grammars()
    form = data.draw(st.sampled_from(list(FORMS)))
    answer = plain_answer(form, "sampled").token_ids
    emitted = answer[: data.draw(st.integers(0, len(answer) - 1))]
    # Mostly tokens that may follow, so that paths are long.
    likely = st.sampled_from(answer) | st.integers(-1, VOCAB_SIZE - 1)
    tokens = [-1] * len(parents)
    depth = [0] * len(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
        tokens[node] = answer[min(len(emitted) + depth[node] - 1, len(answer) - 1)] if data.draw(st.booleans()) else data.draw(likely)
    state = grammars.compile(FORMS[form])
    state.take(emitted)
    allowed = state.allowed(tokens, parents)
    again = state.allowed(tokens, parents)
    assert torch.equal(allowed, again)
    for node in range(len(parents)):
        path, at = [], node
        while at > 0:
            path.append(tokens[at])
            at = parents[at]
        fresh = grammars.compile(FORMS[form])
        fresh.take(emitted)
        reached = True
        for token in path[::-1]:
            reached = reached and 0 <= token != EOS and bool(fresh.allowed([-1], [-1])[0, token])
            if reached:
                fresh.take([token])
        if reached:
            assert torch.equal(allowed[node], fresh.allowed([-1], [-1])[0])


@cache
def all_grammars() -> Grammars:
    return Grammars(json_tokenizer(), VOCAB_SIZE, (EOS,))


def test_a_matcher_that_fails_takes_nothing_else_with_it():
    """A matcher that fails stays failed. The node that it failed at is given nothing, the others what they are due."""
    state = all_grammars().compile(FORMS["regex"])
    right = state.allowed([-1, 0, 0], [-1, 0, 0])
    a, e, b = (json_tokenizer().backend.token_to_id(piece) for piece in ("ab", "e", "d"))
    tokens, parents = [-1, a, e, e, b], [-1, 0, 1, 0, 3]
    expected = state.allowed(tokens, parents)

    class Failing:
        """A matcher that fails when it is to take `e` after `ab`."""

        def __init__(self, matcher, taken=()):
            self.matcher, self.taken, self.failed = matcher, list(taken), False

        def try_consume_tokens(self, tokens):
            if self.failed or self.taken + tokens == [a, e]:
                self.failed = True
                return 0
            self.taken += tokens
            return self.matcher.try_consume_tokens(tokens)

        def rollback(self, count):
            if self.failed:
                return False
            del self.taken[len(self.taken) - count :]
            return self.matcher.rollback(count)

        def consume_tokens(self, tokens):
            self.taken += tokens
            return self.matcher.consume_tokens(tokens)

        def deep_copy(self):
            return Failing(self.matcher.deep_copy(), self.taken)

        def is_error(self):
            return self.failed

        def __getattr__(self, name):
            return getattr(self.matcher, name)

    state = all_grammars().compile(FORMS["regex"])
    state._start, state._matcher = Failing(state._start), Failing(state._matcher)
    allowed = state.allowed(tokens, parents)
    assert not allowed[2].any() and expected[2].any()
    assert torch.equal(allowed[[0, 1, 3, 4]], expected[[0, 1, 3, 4]]) and torch.equal(allowed[0], right[0])
    state.take([a, e])
    assert state.failure and not state.allowed([-1], [-1]).any()


def test_the_vocabulary_as_bytes():
    json_bytes = token_bytes(json_tokenizer().backend, VOCAB_SIZE + 2)
    by_piece = {piece: json_bytes[json_tokenizer().backend.token_to_id(piece)] for piece in ("</s>", "Ġ", "Ã", "©", 'e"', "Ġ}", "\\")}
    assert by_piece == {"</s>": b"</s>", "Ġ": b" ", "Ã": b"\xc3", "©": b"\xa9", 'e"': b'e"', "Ġ}": b" }", "\\": b"\\"}
    assert json_bytes[-2:] == [b"", b""]
    backend = Backend(models.BPE({"▁a": 0, "<0x0A>": 1, "é": 2, "a▁b": 3}, []))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert token_bytes(backend, 4) == [b" a", b"\n", "é".encode(), b"a b"]
    backend.decoder = decoders.Metaspace()
    assert token_bytes(backend, 4) == [b" a", b"<0x0A>", "é".encode(), b"a b"]
    for decoder, name in ((decoders.CTC(), "CTC"), (decoders.Replace(Regex("▁+"), " "), "Replace with a regex")):
        backend.decoder = decoder
        with pytest.raises(EagleError, match=name):
            token_bytes(backend, 4)
    characters = byte_of_character()
    assert sorted(characters.values()) == list(range(256)) and set(characters) == set(ByteLevel.alphabet())


def test_compiled_grammars_are_kept_and_shared_by_none(monkeypatch):
    """One compilation for equal forms, and answers that do not see each other's place in it."""
    compiled = []
    original = llguidance.LLMatcher

    class Counting:
        def __new__(cls, vocabulary, grammar):
            compiled.append(grammar)
            return original(vocabulary, grammar)

        grammar_from_lark = original.grammar_from_lark

    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    grammars = Grammars(json_tokenizer(), VOCAB_SIZE, (EOS,))
    first, second = grammars.compile(StructuredOutputs(regex="ab?c")), grammars.compile(StructuredOutputs(regex="ab?c"))
    first.take([json_tokenizer().backend.token_to_id("a")])
    assert len(compiled) == 1 and not torch.equal(first.allowed([-1], [-1]), second.allowed([-1], [-1]))
    for i in range(40):
        grammars.compile(StructuredOutputs(regex=f"a{{{i + 1}}}"))
    grammars.compile(StructuredOutputs(regex="ab?c"))
    assert len(compiled) == 42


def test_a_tokenizer_that_cannot_be_told_in_bytes_is_refused_by_name():
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    engine = make_engine(tiny_target("llama"), None, Tokenizer(backend, None, {}, ()))
    assert "WordPiece" in engine.generate([PROMPT], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))[0].error


def test_a_choice_that_begins_another_can_be_made():
    """After "ab" the answer may end or go on."""
    tokens = {piece: json_tokenizer().backend.token_to_id(piece) for piece in ("a", "b", "c", "ab", "abc")}
    state = all_grammars().compile(StructuredOutputs(choice=["abc", "ab", "b"]))
    state.take([tokens["a"], tokens["b"]])
    assert state.allowed([-1], [-1])[0].nonzero().flatten().tolist() == sorted((EOS, tokens["c"]))
