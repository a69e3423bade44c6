"""What a request asks of sampling and stopping; names as vLLM has them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from eagle_engine.errors import EagleError

MAX_LOGPROBS = 20
MAX_ANSWERS = 16384


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer; exactly one of them. Checked on creation, but for what the grammar says: that is checked when the request arrives.

    json     a JSON schema, as a dict or as text
    regex    a regular expression for the whole answer
    choice   strings of which the answer is one
    grammar  a grammar in Lark's notation as llguidance takes it (its start rule is `start`), or in GBNF (`root ::= ...`)
    """

    json: dict | str | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise EagleError(f"structured_outputs: expected exactly one of json, regex, choice and grammar, got {', '.join(given) or 'none'}")
        if self.json is not None:
            _schema(self.json)
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise EagleError(f"structured_outputs: {name}: expected a non-empty string, got {text!r}")
        if self.choice is not None and not _strings(self.choice):
            raise EagleError(f"structured_outputs: choice: expected a list of strings, none of them blank, got {self.choice!r}")
        for text in (self.regex, self.grammar, *(self.choice or ())):
            _unicode(given[0], text or "")


@dataclass(frozen=True)
class SamplingParams:
    """Checked on creation, but for what needs the vocabulary or the tokenizer: that is checked when the request arrives.

    temperature       0 = greedy
    top_k             0 or -1 = off
    top_p             1 = off
    min_p             0 = off
    max_tokens        most tokens of the answer
    stop              strings that end the answer; it is cut before them; None = none, here and in the other lists
    stop_token_ids    further token ids that end the answer, beside the model's own end tokens
    ignore_eos        go on after the model's end tokens
    seed              None: a fresh one for each request; the same seed gives the same text
    include_stop_str_in_output   the text keeps the stop string, or the text of the stop token
    skip_special_tokens          the text leaves special tokens out

    What changes the logits, in this order, before temperature and filters:
    structured_outputs   the answer has a form: JSON of a schema, a regular expression, one of some strings, a grammar
    allowed_token_ids    no other token is drawn; None = all
    bad_words            strings that are not drawn: the last token of one is banned where the answer ends with the tokens before it
    min_tokens           tokens of the answer before which neither end tokens are drawn nor stop strings looked for
    logit_bias           token id -> what is added to its logit, -100 to 100
    repetition_penalty   tokens of prompt or answer: logit > 0 ? logit / r : logit * r; 1 = off
    frequency_penalty    taken from the logit for each time that the token is in the answer, -2 to 2; 0 = off
    presence_penalty     taken from the logit of a token that is in the answer, -2 to 2; 0 = off

    What is told beside the text, under the softmax of the logits before all that:
    logprobs             for each token of the answer its log-probability, and those of so many most likely tokens, 0 to 20; None = off
    prompt_logprobs      the same of the prompt's tokens, but for the first

    n                    answers to one prompt; answer i is drawn with seed + i
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: str | list[str] | tuple[str, ...] | None = ()
    stop_token_ids: list[int] | tuple[int, ...] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = ()
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        if 0.0 < self.temperature < 1e-5:
            raise EagleError(f"temperature: expected 0 (greedy) or at least 1e-5, got {self.temperature}")
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise EagleError("top_p: expected a number above 0 up to 1, got 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("stop", "stop_token_ids", "bad_words"):
            values = getattr(self, name)
            if values is None:
                object.__setattr__(self, name, ())
            elif not isinstance(values, (list, tuple, set, frozenset, *((str,) if name == "stop" else ()))):
                raise EagleError(f"{name}: expected a list, got {values!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise EagleError(f"stop: expected non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop_strings", stop)
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        self._check_logits()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        _whole("n", self.n, 1, MAX_ANSWERS)
        if self.n > 1 and self.temperature == 0.0:
            raise EagleError(f"n: expected 1 with temperature 0, where all answers are the same, got {self.n}")

    def _check_logits(self) -> None:
        """What changes the logits."""
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            raise EagleError("repetition_penalty: expected a number above 0, got 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise EagleError(f"logit_bias: expected a dict of token ids and numbers, got {self.logit_bias!r}")
            for token, bias in self.logit_bias.items():
                _whole("logit_bias", token, 0, 2**31 - 1)
                _number("logit_bias", bias, -100.0, 100.0)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise EagleError(f"min_tokens: expected at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        if len(self.bad_words) > 0 and not _strings(self.bad_words):
            raise EagleError(f"bad_words: expected a list of strings, none of them blank, got {self.bad_words!r}")
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, (list, tuple)) or not self.allowed_token_ids:
                raise EagleError(f"allowed_token_ids: expected a list of at least one token id, got {self.allowed_token_ids!r}")
            for token in self.allowed_token_ids:
                _whole("allowed_token_ids", token, 0, 2**31 - 1)
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                raise EagleError(f"structured_outputs: expected StructuredOutputs, got {self.structured_outputs!r}")
            beside = [name for name, given in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens > 0), ("allowed_token_ids", self.allowed_token_ids is not None)) if given]
            if beside:
                raise EagleError(f"structured_outputs: where the answer ends and what it is made of says the grammar; leave out {', '.join(beside)}")

    @property
    def changes_logits(self) -> tuple[str, ...]:
        """Names of the parameters that change logits before temperature and filters."""
        off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "allowed_token_ids": None, "structured_outputs": None}
        changed = [name for name, value in off.items() if getattr(self, name) != value]
        return (*changed, *(name for name in ("logit_bias", "bad_words") if getattr(self, name)))

    @property
    def tells_logprobs(self) -> tuple[str, ...]:
        """Names of the parameters that ask for log-probabilities."""
        return tuple(name for name in ("logprobs", "prompt_logprobs") if getattr(self, name) is not None)


def _strings(values: Iterable[str]) -> bool:
    """Whether it is a list of at least one string, none of them blank."""
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(isinstance(text, str) and text.strip() for text in values)


def _schema(schema: dict | str) -> None:
    try:
        schema = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise EagleError(f"structured_outputs: json: expected a JSON schema, got what is no JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise EagleError(f"structured_outputs: json: expected a JSON schema, which is an object, got {schema!r}")
    _unicode("json", json.dumps(schema, ensure_ascii=False))


def _unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EagleError(f"structured_outputs: {name}: half of a surrogate pair is no valid Unicode: {text[error.start]!r}") from error


def _number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or math.isinf(value):
        bound = f"from {low:g} to {high:g}" if high < math.inf else f"of {low:g} or more"
        raise EagleError(f"{name}: expected a number {bound}, got {value!r}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise EagleError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
