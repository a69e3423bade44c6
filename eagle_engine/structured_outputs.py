"""Answers of a given form: which tokens a grammar allows after each node of a draft tree. The grammars themselves are llguidance's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor

from eagle_engine.errors import EagleError
from eagle_engine.sampling_params import StructuredOutputs
from eagle_engine.tokenizer import Tokenizer

MAX_COMPILED = 32  # grammars that are kept, those used last
DEAD_END = "NoExtensionBias"  # llguidance's word
# Where a grammar leaves one text only, llguidance would allow it in one way of cutting it into tokens only: that of the tokenizer, which differs with what stands before.
NO_FORCING = '\n%llguidance {"no_forcing": true}'


class Grammars:
    """Compiles grammars for one vocabulary; what it knows of the vocabulary is made with the first of them (a third of a second for 49k tokens).

    vocab_size     tokens that the model has logits for
    eos_token_ids  end tokens, which a grammar allows where an answer may end; those of the vocabulary count
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_token_ids = sorted(token for token in eos_token_ids if token < vocab_size)
        self._vocabulary = None
        self._compiled: dict[str, object] = {}  # grammar -> its matcher at the beginning, the one used last at the end

    def compile(self, wanted: StructuredOutputs) -> GrammarState:
        """The grammar at its beginning. EagleError says what is wrong with it."""
        import llguidance  # here, since most requests have no grammar

        if self._tokenizer is None:
            raise EagleError("structured_outputs need a tokenizer, and this engine has none")
        if self._vocabulary is None:
            self._vocabulary = self._describe_vocabulary()
        name, lark = _lark(wanted)
        grammar = llguidance.LLMatcher.grammar_from_lark(lark + NO_FORCING)
        matcher = self._compiled.pop(grammar, None) or llguidance.LLMatcher(self._vocabulary, grammar)
        if matcher.is_error():
            raise EagleError(f"structured_outputs: {name}: {_one_line(matcher.get_error())}")
        self._compiled[grammar] = matcher
        if len(self._compiled) > MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return GrammarState(matcher, self._vocab_size, self._end_token_ids)

    def _describe_vocabulary(self):
        import llguidance

        backend = self._tokenizer.backend
        tokens = token_bytes(backend, self._vocab_size)
        special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special and token < self._vocab_size}
        # A model without an end token gets one past its vocabulary, so that the grammar can say that the answer may end.
        ends = self._end_token_ids or [self._vocab_size]
        if not self._end_token_ids:
            tokens.append(b"<end>")
        described = _Vocabulary(tokens, sorted(special | set(ends)), ends[0])
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(described), n_vocab=len(tokens), eos_token=ends)


class _Vocabulary:
    """What llguidance asks of a tokenizer, under the names it asks for."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        raise AssertionError(f"no grammar is to cut a text into tokens: {text!r}")  # see NO_FORCING


class GrammarState:
    """Where an answer stands in its grammar. A token is allowed where it continues some text of the grammar; end tokens are where the text so far is one."""

    def __init__(self, matcher, vocab_size: int, end_token_ids: list[int]) -> None:
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._vocab_size, self._end_token_ids = vocab_size, frozenset(end_token_ids)
        self._taken: list[int] = []
        self._failure: str | None = None
        self._has_end = bool(end_token_ids)

    def take(self, token_ids: list[int]) -> None:
        """Go on by tokens that the answer has got, each of which was allowed."""
        for token in token_ids:
            if token in self._end_token_ids:
                continue  # nothing follows it
            if self._failure is None and self._matcher.try_consume_tokens([token]) != 1:
                self._failure = _one_line(self._matcher.get_error()) or f"it does not take token {token}"
            self._taken.append(token)

    @property
    def failure(self) -> str | None:
        """Why nothing is allowed, if it is not that no token continues the text: the grammar has outgrown llguidance's limits."""
        message = self._failure or _one_line(self._matcher.get_error())
        return None if message in ("", DEAD_END) else message

    def is_complete(self) -> bool:
        """For a model without an end token: whether the text so far is one of the grammar and nothing may follow."""
        if self._has_end:
            return False
        words = self._allowed_words()
        return self._matcher.is_accepting() and not unpack_words(words[None], self._vocab_size).any()

    def allowed(self, tokens: list[int], parent: list[int]) -> Tensor:
        """The tokens allowed after each node of a tree, [N, V] bool on the CPU.

        tokens, parent  N entries, parent[i] < i. Node 0 stands for all that was taken so far. Of a node that is not allowed itself (or is -1), and of those below it, all tokens: they are never accepted.
        """
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[parent[node]].append(node)
        words = torch.full((len(tokens), -(-self._num_tokens // 32)), -1, dtype=torch.int32)

        def walk(node: int) -> None:
            words[node] = self._allowed_words()
            for child in children[node]:
                token = tokens[child]
                if token < 0 or token in self._end_token_ids:
                    continue
                if self._matcher.try_consume_tokens([token]) == 1:
                    walk(child)
                    if self._matcher.rollback(1):
                        continue
                elif not self._matcher.is_error():
                    continue
                else:
                    words[child] = 0
                self._rebuild(tokens, parent, node)

        walk(0)
        return unpack_words(words, self._vocab_size)

    @property
    def _num_tokens(self) -> int:
        return self._vocab_size + (not self._has_end)

    def _allowed_words(self) -> Tensor:
        """Bit t % 32 of word t // 32: token t may follow. int32; none when the grammar has come to a dead end."""
        words = torch.zeros(-(-self._num_tokens // 32), dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        if self._failure is not None or self._matcher.is_error():
            return words.zero_()
        return words

    def _rebuild(self, tokens: list[int], parent: list[int], node: int) -> None:
        """A matcher that has come to a dead end, or failed at llguidance's limits, stays there: put another one in its place, at the same node."""
        path = []
        while node > 0:
            path.append(tokens[node])
            node = parent[node]
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._taken + path[::-1])


def unpack_words(words: Tensor, count: int) -> Tensor:
    """[R, W] int32 -> the first `count` bits of each row, lowest first, [R, count] bool."""
    bits = words.contiguous().view(torch.uint8)[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.view(words.shape[0], -1)[:, :count].bool()


def token_bytes(backend: Backend, vocab_size: int) -> list[bytes]:
    """The text of each token as bytes, which single tokens need not have as characters; b"" for ids that the tokenizer lacks."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": "Fuse"}
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    unknown = kinds - {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"} | {"Replace with a regex" for part in parts if part["type"] == "Replace" and "String" not in part["pattern"]}
    if unknown:
        raise EagleError(f"structured_outputs: this tokenizer's decoder has a part that they do not know: {', '.join(sorted(unknown))}")
    replaced = [(part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"] + [(part["replacement"], " ") for part in parts if part["type"] == "Metaspace"]
    added = {token: entry.content for token, entry in backend.get_added_tokens_decoder().items()}
    to_byte = byte_of_character() if "ByteLevel" in kinds else None

    def of(token: int) -> bytes:
        if token in added:
            return added[token].encode()
        text = backend.id_to_token(token)
        if text is None:
            return b""
        if to_byte is not None and all(character in to_byte for character in text):
            return bytes(to_byte[character] for character in text)
        if "ByteFallback" in kinds and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        for pattern, content in replaced:
            text = text.replace(pattern, content)
        return text.encode()

    return [of(token) for token in range(vocab_size)]


def byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write a byte that prints as itself, the others as the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _lark(wanted: StructuredOutputs) -> tuple[str, str]:
    """Which of the four it is, and a grammar in Lark's notation for it."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.json is not None:
        schema = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return "json", "start: %json " + json.dumps(schema, ensure_ascii=False)
    if wanted.choice is not None:
        # One terminal: as alternatives of a rule there could be no more than 2000.
        return "choice", "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
    if wanted.regex is not None:
        return "regex", f"start: /{llguidance.regex_to_lark(wanted.regex, '')}/"
    try:
        return "grammar", any_to_lark(wanted.grammar)
    except Exception as error:  # GbnfToLarkError and plain Exception
        raise EagleError(f"structured_outputs: grammar: {_one_line(str(error))}") from error


def _one_line(message: str) -> str:
    """Of llguidance's messages what is wrong and where, without the grammar around it and without the state of its parser."""
    return " ".join(re.split(r"\n\s*\d+ \| |<state>", message)[0].split())
