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


@dataclass(frozen=True)
class Logprob:
    """What the target held of one token at one place.

    logprob        its log-probability under softmax of the target's logits, before everything that sampling parameters do to them
    rank           1 = the most likely; of equally likely tokens the smaller id comes first
    decoded_token  its text; None without a tokenizer
    """

    logprob: float
    rank: int
    decoded_token: str | None


# Of one place: the token that stands there, then the most likely ones, most likely first.
TokenLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One answer.

    index               0 to n - 1
    text                the answer, cut before a stop string, without special tokens
    token_ids           all tokens of the answer, with the end token or those of a stop string
    finish_reason       "stop", "length", "abort" or "error"
    stop_reason         the stop string or stop token id that ended it; None for the model's own end token, the end of a grammar and everything else
    error               what went wrong, when finish_reason is "error"; text and token_ids hold what came before
    logprobs            of each token of token_ids; None unless asked for
    cumulative_logprob  sum of the log-probabilities of token_ids; None unless `logprobs` was asked for
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass
class RequestOutput:
    """A finished request.

    outputs          its answers, `n` of them; one that says why when the request could not be served
    prompt_logprobs  of each token of the prompt, None for the first; None unless asked for

    text, token_ids, finish_reason, stop_reason, error, stats: those of the first answer.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def stats(self) -> RequestStats:
        return self.outputs[0].stats


class TextDelta(NamedTuple):
    """A piece of a streamed answer.

    text           new text
    token_ids      new tokens
    finish_reason  None until the last piece
    stats          how the request went; None until the last piece
    logprobs       of each of token_ids; None unless asked for
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stats: RequestStats | None
    logprobs: list[TokenLogprobs] | None = None
