"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class RequestStats:
    """How a request went.

    num_cached_tokens    tokens of the prompt whose rows were found in the KV cache
    steps                draft-and-verify cycles
    acceptance_length    tokens emitted per step (without the token of the prefill); 0 before the first step
    acceptance_by_depth  share of the steps whose accepted path reached depth 1, 2, ...
    tokens_per_second    tokens of the answer over the time from the start of the prefill to the last token
    time_per_phase       seconds in prefill and in draft, verify, sample, compact, or in graph where a step is captured whole, while this request ran; phases are shared by the sequences of a batch
    """

    num_cached_tokens: int = 0
    steps: int = 0
    acceptance_length: float = 0.0
    acceptance_by_depth: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    time_per_phase: dict[str, float] = field(default_factory=dict)


@dataclass
class RequestOutput:
    """A finished request.

    text           the answer, cut before a stop string, without special tokens
    token_ids      all tokens of the answer, with the end token or those of a stop string
    finish_reason  "stop", "length", "abort" or "error"
    stop_reason    the stop string or stop token id that ended it; None for the model's own end token and everything else
    error          what went wrong, when finish_reason is "error"; text and token_ids hold what came before
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    error: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)


class TextDelta(NamedTuple):
    """A piece of a streamed answer.

    text           new text
    token_ids      new tokens
    finish_reason  None until the last piece
    stats          how the request went; None until the last piece
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stats: RequestStats | None
