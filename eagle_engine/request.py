"""The host's side of one request: tokens as they are emitted, text, and where it ends. Plain and speculative decoding end here by the same rules."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tokenizers.decoders import DecodeStream
from torch import Tensor

from eagle_engine.logits_processing import LogitsProcessor
from eagle_engine.outputs import CompletionOutput, RequestOutput, RequestStats, TextDelta, TokenLogprobs
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.tokenizer import Tokenizer

NOT_USABLE = "the target's logits were not usable at position {position} (NaN, or nothing above minus infinity)"


@dataclass(eq=False)
class Request:
    """One answer to a request, from the request's arrival to the answer's end.

    prompt_ids  token ids of the prompt
    limit       most tokens of the answer: max_tokens, or what the longest sequence leaves
    seed        the one that all its draws are keyed with
    held        its output is read from here, not from Engine.step
    processor   what it does to the logits and wants to know of them; None: nothing
    index       which of the request's answers
    answers     all answers to the request, in order, this one among them

    Of the scheduler:
    arrival        place in the order of arrival
    pages          its pages of the KV cache, none while it waits
    sequence       the tokens whose rows are committed before it decodes: the prompt, and what it has emitted before it was preempted, but for the last token, which is the root
    num_prefilled  rows of the sequence that are committed, those that were found in the cache among them
    page_table     [1, max_pages] int32 on the device, for the prefill
    device_ids     the sequence [n] int64 on the device
    gains          what is known of the drafts that trees of each shape have accepted (tree_sizes); [] at first
    draft_rows     rows that are final in the drafter's cache, once it decodes; at least
    num_missed     pairs that the drafter has missed since; at most
    """

    request_id: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    limit: int
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    held: bool = False
    processor: LogitsProcessor | None = None
    index: int = 0
    answers: list[Request] = field(default_factory=list, repr=False)
    arrival: int = 0
    pages: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    page_table: Tensor | None = None
    device_ids: Tensor | None = None
    gains: list[float | None] = field(default_factory=list)
    draft_rows: int = 0
    num_missed: int = 0

    def __post_init__(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self.params.skip_special_tokens)
        self._text = ""  # decoded so far, a character that is not complete yet left out
        self._num_decoded = 0  # tokens that it is the text of
        self._cut: int | None = None
        self._streamed = 0
        self._num_received = 0
        self._num_streamed_tokens = 0
        self._num_cached = 0
        self._steps = 0
        self._reached: list[int] = []
        self._started = self._ended = time.perf_counter()
        self._phases_before: dict[str, float] = {}
        self._phases: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_rows(self) -> int:
        """Rows that the host knows to be committed while it decodes: all tokens but the root."""
        return len(self.prompt_ids) + max(len(self.token_ids), 1) - 1

    def admitted(self, phases: dict[str, float], num_found: int) -> None:
        """It has pages, `num_found` rows of which were computed for others. A preempted request is admitted again, and goes on where it was."""
        self._num_received = 0
        if not self.token_ids:
            self._started = time.perf_counter()
            self._phases_before = dict(phases)
            self._num_cached = num_found

    @property
    def all_finished(self) -> bool:
        """Whether every answer to the request has ended."""
        return all(request.finished for request in self.answers)

    def updated_processor(self) -> LogitsProcessor | None:
        """The processor, brought up to the tokens so far: what a step and a prefill are given."""
        if self.processor is not None:
            self.processor.update(self.token_ids)
        return self.processor

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every token that ends this answer."""
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else self.eos_token_ids)

    def receive(self, ring: list[int]) -> int | None:
        """Take the tokens of an output ring that are new: ring[n % C] is token n of the sequence, ring[-1] the number of all that were emitted. The accepted drafts among them; None without a step."""
        size, count = len(ring) - 1, ring[-1]
        if count - self._num_received > size:
            raise AssertionError(f"{count - self._num_received} tokens were emitted since the last look, the ring holds {size}")
        new = [ring[n % size] for n in range(self._num_received, count)]
        self._num_received = count
        from_steps = len(new) - (0 if self.token_ids else 1)
        # The first token of all is that of the prefill.
        for emitted in (new[:1], new[1:]) if not self.token_ids else (new,):
            if emitted and not self.finished:
                self.append(emitted)
        return from_steps - 1 if from_steps > 0 else None

    def append(self, emitted: list[int]) -> None:
        """Take the tokens that a step emitted, one after the other, until one of them ends the answer; the rest of the run is dropped."""
        before = len(self.token_ids)
        for token in emitted:
            self._append_token(token)
            if self.finished:
                break
        kept = len(self.token_ids) - before
        if before > 0 and kept > 0:
            self._steps += 1
            self._reached.extend([0] * (kept - 1 - len(self._reached)))
            for depth in range(kept - 1):
                self._reached[depth] += 1

    def _append_token(self, token: int) -> None:
        if self.processor is not None and self.processor.failure is not None:
            self.finish("error", error=self.processor.failure)
            return
        if token < 0:
            banned = None if self.processor is None else self.processor.why_nothing_is_allowed(self.token_ids)
            self.finish("error", error=banned or NOT_USABLE.format(position=len(self.prompt_ids) + len(self.token_ids)))
            return
        self.token_ids.append(token)
        if token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish("stop")
            return
        if token in self.params.stop_token_ids:
            self.finish("stop", stop_reason=token)
            return
        if self.tokenizer is not None:
            try:
                piece = self._decode_next()
            except Exception as error:  # of the tokenizer: anything
                self.finish("error", error=f"the tokenizer cannot decode token {token}: {type(error).__name__}: {error}")
                return
            if piece:
                self._text += piece
                if len(self.token_ids) > self.params.min_tokens and self._find_stop_string(len(piece)):
                    return
        if self.processor is not None and self.processor.is_complete(self.token_ids):
            self.finish("stop")
            return
        if len(self.token_ids) >= self.limit:
            self.finish("length")

    def _decode_next(self) -> str | None:
        """The text that the newest token adds; None while a character is not complete."""
        backend, token = self.tokenizer.backend, self.token_ids[-1]
        try:
            piece = self._stream.step(backend, token)
        except Exception:  # all that DecodeStream raises
            # Tokens that are bytes are decoded as a run, which is all replacement characters once one of its bytes fits nowhere: what was told of the run has changed. It stands, and the rest of the run is
            # decoded by itself.
            piece = self.tokenizer.decode(self.token_ids[self._num_decoded :], self.params.skip_special_tokens)
            self._stream = DecodeStream(skip_special_tokens=self.params.skip_special_tokens)
            self._stream.step(backend, token)  # so that the next token has one before it, as in the text
        if piece:
            self._num_decoded = len(self.token_ids)
        return piece

    def _find_stop_string(self, new: int) -> bool:
        """The stop string that occurs first in the text; only the end of the text can hold a new one."""
        found: tuple[int, str] | None = None
        for stop in self.params.stop_strings:
            at = self._text.find(stop, max(0, len(self._text) - new - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return False
        at, stop = found
        self._cut = at + len(stop) if self.params.include_stop_str_in_output else at
        self.finish("stop", stop_reason=stop)
        return True

    def finish(self, reason: str, *, stop_reason: str | int | None = None, error: str | None = None) -> None:
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self._ended = time.perf_counter()

    def release(self) -> None:
        """Hold nothing on the device: it waits again, or has ended. Its answers hold each other, so that it goes itself only when Python looks for such circles."""
        self.page_table = self.device_ids = None
        if self.processor is not None:
            self.processor.release()

    def end(self, phases: dict[str, float]) -> None:
        spent = {name: seconds - self._phases_before.get(name, 0.0) for name, seconds in phases.items()}
        self._phases = {name: seconds for name, seconds in spent.items() if seconds > 0}

    def text(self) -> str:
        """The answer so far. A finished answer is decoded whole, so that a last incomplete character shows as the tokenizer shows it, and begins with what was streamed."""
        if self._cut is not None:
            return self._text[: self._cut]
        if not self.finished or self.tokenizer is None or self.finish_reason == "error":
            return self._text
        # The token that ended the answer stands in token_ids; in the text only when asked for.
        hidden = self.finish_reason == "stop" and not self.params.include_stop_str_in_output
        whole = self.tokenizer.decode(self.token_ids[:-1] if hidden else self.token_ids, self.params.skip_special_tokens)
        return whole if whole.startswith(self._text) else self._text

    def delta(self) -> TextDelta:
        """What is new since the last call. Text that may turn out to begin a stop string is held back until it is known not to."""
        text = self.text()
        held = 0 if self.finished else max((_overlap(text, stop) for stop in self.params.stop_strings), default=0)
        end = max(self._streamed, len(text) - held)
        new = slice(self._num_streamed_tokens, len(self.token_ids))
        new_text, logprobs = text[self._streamed : end], self._logprobs()
        self._streamed, self._num_streamed_tokens = end, len(self.token_ids)
        return TextDelta(new_text, self.token_ids[new], self.finish_reason, self.stats() if self.finished else None, None if logprobs is None else logprobs[new])

    def _logprobs(self) -> list[TokenLogprobs] | None:
        """Of token_ids; what was drawn beyond the end of the answer is left out."""
        return None if self.params.logprobs is None else self.processor.logprobs[: len(self.token_ids)]

    def stats(self) -> RequestStats:
        generated = len(self.token_ids)
        seconds = self._ended - self._started
        return RequestStats(
            num_cached_tokens=self._num_cached,
            steps=self._steps,
            acceptance_length=(generated - 1) / self._steps if self._steps else 0.0,
            acceptance_by_depth=[count / self._steps for count in self._reached] if self._steps else [],
            tokens_per_second=generated / seconds if seconds > 0 else 0.0,
            time_per_phase=self._phases,
        )

    def completion(self) -> CompletionOutput:
        logprobs = self._logprobs()
        total = None if logprobs is None else sum(place[token].logprob for place, token in zip(logprobs, self.token_ids))
        return CompletionOutput(
            self.index, self.text(), list(self.token_ids), self.finish_reason or "abort", self.stop_reason, self.error, logprobs, total, self.stats()
        )

    def output(self) -> RequestOutput:
        """Of the whole request."""
        first = self.answers[0]
        prompt_logprobs = None if first.params.prompt_logprobs is None else [None, *first.processor.prompt_logprobs]
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, [answer.completion() for answer in self.answers], prompt_logprobs)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
