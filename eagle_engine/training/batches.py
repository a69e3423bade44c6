"""Rows of the data as batches, in an order that follows from the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from eagle_engine.errors import EagleError
from eagle_engine.training.dataset import TokenData, pack
from eagle_engine.training.objective import Batch
from eagle_engine.training.target_states import CachedStates, LiveStates, States, batches_of_like_length


_LENGTH_STEP = 64  # the CPU's matrix library keeps a plan, and memory, for every size that it meets


class Place(NamedTuple):
    """Where in the data a batch comes from; rows: the conversations of each row, by number."""

    epoch: int
    number: int
    rows: list[list[int]]


class Batches:
    """Batches of `batch_size` rows of max_length tokens for one of `num_processes` processes.

    In every epoch the conversations are shuffled and packed anew, with a seed of the epoch's own; a remainder that does not fill a batch for every process is left out of the epoch.
    """

    def __init__(self, data: TokenData, states: CachedStates | LiveStates, *, max_length: int, batch_size: int, seed: int, process: int = 0, num_processes: int = 1) -> None:
        self.data, self.states, self.max_length = data, states, max_length
        self._batch_size, self._seed, self._process, self._num_processes = batch_size, seed, process, num_processes
        self._train = np.flatnonzero(~data.held_out)

    def epoch(self, epoch: int) -> list[Place]:
        """This process's share of an epoch."""
        rows = pack(self.data, self._train, self.max_length, random.Random(f"{self._seed}:{epoch}"))
        per_step = self._batch_size * self._num_processes
        if len(rows) < per_step:
            raise EagleError(
                f"the data fills {len(rows)} rows of {self.max_length} tokens, {per_step} are needed for batch_size {self._batch_size} on {self._num_processes} process(es): "
                "give more data, a smaller max_length or a smaller batch_size"
            )
        starts = range(self._process * self._batch_size, len(rows) // per_step * per_step, per_step)
        return [Place(epoch, number, rows[start : start + self._batch_size]) for number, start in enumerate(starts)]

    def from_position(self, position: int) -> Iterator[tuple[Place, Batch]]:
        """All batches from number `position` of the run on, without end; the next one is read while one is worked on."""
        with ThreadPoolExecutor(1) as reader:
            waiting = None
            for place in self._places(position):
                following = reader.submit(self.collate, place.rows)
                if waiting is not None:
                    yield waiting[0], waiting[1].result()
                waiting = (place, following)

    def _places(self, position: int) -> Iterator[Place]:
        epoch = 0
        while True:
            places = self.epoch(epoch)
            yield from places[position:]
            position = max(0, position - len(places))
            epoch += 1

    def held_out(self) -> Iterator[Batch]:
        """This process's share of the held-out conversations, each once; batches with nothing to learn where others have one more, since sharded weights are gathered by all processes together."""
        rows = pack(self.data, np.flatnonzero(self.data.held_out), self.max_length)
        for start in range(0, len(rows), self._batch_size * self._num_processes):
            mine = rows[start + self._process * self._batch_size :][: self._batch_size]
            batch = self.collate(mine or rows[:1])
            yield batch if mine else batch._replace(supervised=torch.zeros_like(batch.supervised))

    def collate(self, rows: list[list[int]]) -> Batch:
        """A batch of these conversations, as long as the longest row and a little more: lengths are multiples of _LENGTH_STEP where max_length lets them."""
        data = self.data
        found = self._states_of([number for row in rows for number in row])
        length = max(sum(int(data.lengths[number]) for number in row) for row in rows)
        length = min(max(self.max_length, length), -(-length // _LENGTH_STEP) * _LENGTH_STEP)
        first = next(iter(found.values()))
        batch = Batch(
            tokens=torch.zeros(len(rows), length, dtype=torch.int64),
            position_ids=torch.zeros(len(rows), length, dtype=torch.int64),
            documents=torch.full((len(rows), length), -1),
            supervised=torch.zeros(len(rows), length, dtype=torch.bool),
            states=torch.zeros(len(rows), length, first.states.shape[1], dtype=first.states.dtype),
            features=torch.zeros(len(rows), length, first.features.shape[1], dtype=first.features.dtype),
            best=torch.zeros(len(rows), length, dtype=torch.int64),
        )
        for i, row in enumerate(rows):
            at = 0
            for document, number in enumerate(row):
                span = slice(int(data.offsets[number]), int(data.offsets[number + 1]))
                size = span.stop - span.start
                place = (i, slice(at, at + size))
                batch.tokens[place] = torch.from_numpy(data.tokens[span].astype(np.int64))
                batch.position_ids[place] = torch.arange(size)
                batch.documents[place] = document
                batch.supervised[place] = torch.from_numpy(data.supervised[span])
                for name in ("states", "features", "best"):
                    getattr(batch, name)[place] = getattr(found[number], name)
                at += size
        return batch

    def _states_of(self, numbers: list[int]) -> dict[int, States]:
        if isinstance(self.states, CachedStates):
            return {number: self.states.of_conversation(number) for number in numbers}
        data = self.data
        found = {}
        for batch in batches_of_like_length(numbers, data.lengths):
            for number, states in zip(batch, self.states.of([data.tokens[data.offsets[number] : data.offsets[number + 1]] for number in batch])):
                found[number] = States(*(tensor.cpu() for tensor in states))
        return found
