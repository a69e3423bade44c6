"""Which requests wait, are being prefilled and decode, and which pages of the KV cache they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from eagle_engine.config import EagleConfig
from eagle_engine.kv_cache import PagePool
from eagle_engine.prefill import PrefilledRow, begin, draw_first, prefill_piece
from eagle_engine.request import Request
from eagle_engine.state import DecodeState
from eagle_engine.step import Models, PhaseTimer

IDLE_CHUNKS = 16  # pieces of prompts per step while nobody decodes


class Scheduler:
    """Requests in order of arrival, through three stages: waiting -> prefilling (one at a time) -> running, and back to waiting when pages run out (the latest first: preemption by recompute).

    Running requests are the first slots of the state, in no particular order; the others have none. Before a step every running request holds pages for all rows that the step may write.

    step_rows  rows that a step may use above those that the host knows to be committed
    chunk      prompt tokens of one forward
    """

    def __init__(self, models: Models, state: DecodeState, pages: PagePool, config: EagleConfig, step_rows: int, chunk: int, timer: PhaseTimer) -> None:
        self.models, self.state, self.pages, self.timer = models, state, pages, timer
        self.chunk = chunk
        self.num_preemptions = 0
        self.waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.running: list[Request] = []
        self._step_rows, self._max_requests, self._reuse = step_rows, config.max_batch_size, config.enable_prefix_caching
        self._num_arrived = 0
        self._device = models.target.device

    @property
    def is_empty(self) -> bool:
        return not self.waiting and self.prefilling is None and not self.running

    def add(self, request: Request) -> None:
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(request)

    def find(self, request_id: int) -> list[Request]:
        """The answers to a request that have not ended."""
        return [request for stage in (self.waiting, [self.prefilling] if self.prefilling is not None else [], self.running) for request in stage if request.request_id == request_id]

    def prefill(self) -> list[Request]:
        """Admit waiting requests and run pieces of their prompts, one request after the other: one piece while others decode, which would wait, else several. The requests that decode from now on."""
        started: list[Request] = []
        budget = self.chunk * (1 if self.running else IDLE_CHUNKS)
        while budget > 0 and (self.prefilling is not None or self._admit()):
            request = self.prefilling
            self.timer.start()
            start = request.num_prefilled
            stop = min(start + self.chunk, len(request.sequence), start + budget)
            budget -= stop - start
            row = prefill_piece(self.models, self.state, request.page_table, request.device_ids, start, stop, request.processor)
            request.num_prefilled = stop
            if stop == len(request.sequence):
                self._start_decoding(request, row)
                started.append(request)
            self.timer.lap("prefill")
        return started

    def _admit(self) -> bool:
        """Give the first waiting request the pages of its prompt, if there are a slot and as many pages."""
        if not self.waiting or len(self.running) == self._max_requests:
            return False
        request = self.waiting[0]
        sequence = request.prompt_ids + request.token_ids[:-1]
        # Rows that are found have no logits, which prompt_logprobs needs of all.
        found = self.pages.find(sequence) if self._reuse and request.params.prompt_logprobs is None else []
        needed = self.pages.pages_for(len(sequence) + self._step_rows) - len(found)
        # Those that run will need pages for what they are going to write; without others there is always room, or the request would have been refused.
        if self.running and needed + len(self.running) > self.pages.num_free:
            self.pages.give_back(found)
            return False
        self.waiting.popleft()
        request.sequence, request.pages = sequence, found + self.pages.take(needed)
        request.num_prefilled = len(found) * self.pages.page_size
        request.admitted(self.timer.seconds, request.num_prefilled)
        request.page_table = torch.full((1, self.state.page_table.shape[1]), self.pages.num_pages, dtype=torch.int32, device=self._device)
        request.page_table[0, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32, device=self._device)
        request.device_ids = torch.tensor(sequence, device=self._device)
        self.prefilling = request
        return True

    def _start_decoding(self, request: Request, row: PrefilledRow) -> None:
        slot, state, length = len(self.running), self.state, len(request.sequence)
        self.prefilling = None
        self.running.append(request)
        state.page_table[slot] = request.page_table[0]
        state.set_sampling(slot, request.params, request.seed)
        state.set_stop_tokens(slot, request.stop_token_ids)
        resumed = bool(request.token_ids)
        # Drawn anew, the last token would be the same; it is known.
        root = torch.tensor(request.token_ids[-1:], device=self._device) if resumed else draw_first(self.models, state, slot, row, length, request.updated_processor())
        begin(state, slot, row, root, length, num_emitted=0 if resumed else 1)
        request.draft_rows, request.num_missed = length - 1, 0
        self._register(request)

    def make_room(self, settle: Callable[[], None] | None = None) -> None:
        """Pages for the next step of every running request, the oldest first; the latest requests are preempted for them.

        settle  delivers the tokens of a step that is still on its way: called before the first preemption, since a request goes on from the tokens that the host knows
        """
        for request in sorted(self.running, key=_arrival):
            while request in self.running:
                missing = self.pages.pages_for(request.num_rows + self._step_rows) - len(request.pages)
                if missing <= 0:
                    break
                if missing <= self.pages.num_free:
                    self._grow(request, missing)
                    break
                if settle is not None:
                    settle()
                    settle = None
                    continue
                self.preempt(self.prefilling or max(self.running, key=_arrival))

    def _grow(self, request: Request, count: int) -> None:
        slot, held = self.running.index(request), len(request.pages)
        request.pages += self.pages.take(count)
        self.state.page_table[slot, held : held + count] = torch.tensor(request.pages[held:], dtype=torch.int32, device=self._device)

    def preempt(self, request: Request) -> None:
        """Take a request's pages; it waits, before all others, to be computed anew from its tokens."""
        self.num_preemptions += 1
        self._leave(request)
        self.waiting.appendleft(request)

    def retire(self, request: Request) -> None:
        """Forget a request that has ended, wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.end(self.timer.seconds)

    def _register(self, request: Request) -> None:
        """Let others find the pages of a request whose rows are final."""
        if not self._reuse:
            return
        drafts = self.state.draft_cache is not None
        if request is self.prefilling:
            rows = request.num_prefilled - (1 if drafts else 0)  # the drafter's pair of the last row may wait for its token
        else:
            rows = request.draft_rows if drafts else request.num_rows
        self.pages.register(request.prompt_ids + request.token_ids, request.pages, rows)

    def _leave(self, request: Request) -> None:
        self._register(request)
        self.pages.give_back(request.pages)
        request.pages = []
        request.release()
        if request is self.prefilling:
            self.prefilling = None
            return
        # The last slot moves into the gap, so that the running ones stay together.
        slot, last = self.running.index(request), len(self.running) - 1
        if slot != last:
            self.state.move(last, slot)
            self.running[slot] = self.running[last]
        self.running.pop()
        self.state.clear(last)


def _arrival(request: Request) -> int:
    return request.arrival
