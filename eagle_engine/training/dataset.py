"""Token ids of all conversations in one file, split by conversation and packed into rows."""

from __future__ import annotations

import hashlib
import os
import random
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_engine.errors import EagleError
from eagle_engine.training.conversations import Conversation, LeftOut

_OPEN_ROWS = 16  # rows that packing keeps open: enough to fill them to about 98 %, few enough to keep the order random


@dataclass(frozen=True)
class TokenData:
    """Conversations one after the other.

    tokens      [total] int32
    supervised  [total] bool
    offsets     [n + 1] int64; conversation i is tokens[offsets[i] : offsets[i + 1]]
    held_out    [n] bool
    ids         [n]
    """

    tokens: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray
    held_out: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Of everything that decides what a position in the data means."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.supervised, self.offsets, self.held_out):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def count(self, vocab_size: int) -> np.ndarray:
        """[vocab_size] int64, how often each token is an assistant's in the conversations that are trained on."""
        train = np.repeat(~self.held_out, self.lengths)
        return np.bincount(self.tokens[train & self.supervised], minlength=vocab_size)

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(file, tokens=self.tokens, supervised=self.supervised, offsets=self.offsets, held_out=self.held_out, ids=self.ids)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> TokenData:
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(**{name: file[name] for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise EagleError(f"{path}: no data of a training run: {error}") from error


def build_data(conversations: Sequence[Conversation], max_length: int, validation_share: float, left_out: LeftOut) -> TokenData:
    """Put conversations together; those that are too long, or stand there twice, are counted in left_out.

    Whether a conversation is held out depends on its prompt (what comes before the first supervised token) alone, so that answers to one prompt never stand on both sides.
    """
    kept, seen, held_out = [], set(), []
    for conversation in conversations:
        if len(conversation.token_ids) > max_length:
            left_out.add(f"longer than max_length {max_length}", conversation.id)
            continue
        key = hashlib.sha256(conversation.token_ids.tobytes()).digest()
        if key in seen:
            left_out.add("the same conversation stood there before", conversation.id)
            continue
        seen.add(key)
        kept.append(conversation)
        prompt = conversation.token_ids[: int(conversation.supervised.argmax())]
        held_out.append(int.from_bytes(hashlib.sha256(prompt.tobytes()).digest()[:8], "little") / 2**64 < validation_share)
    if not kept:
        raise EagleError("no conversation is left to train on:\n" + "\n".join(left_out.lines() or ["the data files are empty"]))
    flags = np.array(held_out)
    if flags.all() or not flags.any():
        # Too few for the share to be met by chance: hold out the last, or the first if it is the only one.
        if len(kept) < 2:
            raise EagleError("one conversation is left, which cannot be both trained on and held out: give more data")
        flags[:] = False
        flags[-1] = True
    lengths = [len(conversation.token_ids) for conversation in kept]
    return TokenData(
        tokens=np.concatenate([conversation.token_ids for conversation in kept]),
        supervised=np.concatenate([conversation.supervised for conversation in kept]),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        held_out=flags,
        ids=np.array([conversation.id for conversation in kept]),
    )


def pack(data: TokenData, chosen: np.ndarray, row_length: int, order: random.Random | None = None) -> list[list[int]]:
    """Conversations put into rows of at most row_length tokens; order: shuffles them and the rows, None keeps the order."""
    numbers = [int(i) for i in chosen]
    if order is not None:
        order.shuffle(numbers)
    lengths = data.lengths
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    for number in numbers:
        length = int(lengths[number])
        fitting = [i for i, (room, _) in enumerate(open_rows) if room >= length]
        if fitting:
            # The row that it fills best.
            best = min(fitting, key=lambda i: open_rows[i][0])
            room, row = open_rows[best]
            row.append(number)
            open_rows[best] = (room - length, row)
            continue
        if len(open_rows) == _OPEN_ROWS:
            fullest = min(range(_OPEN_ROWS), key=lambda i: open_rows[i][0])
            rows.append(open_rows.pop(fullest)[1])
        open_rows.append((row_length - length, [number]))
    rows += [row for _, row in open_rows]
    if order is not None:
        order.shuffle(rows)
    return rows
