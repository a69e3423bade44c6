"""What a request asks of sampling and stopping; names as vLLM has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from eagle_engine.errors import EagleError


@dataclass(frozen=True)
class SamplingParams:
    """Checked on creation.

    temperature       0 = greedy
    top_k             0 or -1 = off
    top_p             1 = off
    min_p             0 = off
    max_tokens        most tokens of the answer
    stop              strings that end the answer; it is cut before them
    stop_token_ids    further token ids that end the answer, beside the model's own end tokens
    ignore_eos        go on after the model's end tokens
    seed              None: a fresh one for each request; the same seed gives the same text
    include_stop_str_in_output   the text keeps the stop string, or the text of the stop token
    skip_special_tokens          the text leaves special tokens out
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
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
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise EagleError(f"stop: expected non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop_strings", stop)
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)


def _number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or math.isinf(value):
        bound = f"from {low:g} to {high:g}" if high < math.inf else f"of {low:g} or more"
        raise EagleError(f"{name}: expected a number {bound}, got {value!r}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise EagleError(f"{name}: expected a whole number from {low} to {high}, got {value!r}")
