"""The paged KV cache: a pool of pages, one page table for target and drafter alike, and the index by which a prompt finds pages that hold its beginning already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Entry(NamedTuple):
    """What an indexed page is found by: its place after the page before it, and its tokens."""

    before: int
    token_ids: tuple[int, ...]


class PagePool:
    """Pages that sequences take, share and give back; page ids are the same in every cache that shares the pool.

    A page is free, held by one or more sequences, or cached: nobody holds it, but it is in the index and its rows are worth keeping until somebody needs the room. Cached pages count as free, since `take`
    uses them (the one longest unused first, of a sequence its last) once there are no others.

    lookahead  tokens after a page that its rows depend on, beside those up to its end: 1 with a drafter, whose pair i is made of token i + 1, else 0. A page is found only where these tokens agree as
               well, so its rows in both caches are those that a cold run would write
    """

    def __init__(self, num_pages: int, page_size: int, lookahead: int = 0) -> None:
        self.num_pages, self.page_size, self.lookahead = num_pages, page_size, lookahead
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        # Every indexed page has a number of its own, never used again, so that pages which follow an evicted one are not found through whatever takes its place.
        self._index: dict[_Entry, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._numbers: dict[int, int] = {}
        self._next_number = 1

    @property
    def num_free(self) -> int:
        """Pages that can be taken, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return sum(count > 0 for count in self._holders)

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has made sure that there are as many."""
        taken = []
        for _ in range(count):
            if not self._free:
                page, _ = self._cached.popitem(last=False)
                self._unindex(page)
                self._free.append(page)
            page = self._free.pop()
            self._holders[page] = 1
            taken.append(page)
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Hold these pages of one sequence, in their order, no longer."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] < 0:
                raise AssertionError(f"page {page} was given back more often than it was taken")
            if self._holders[page] == 0:
                if page in self._entries:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Hold the indexed pages that begin a sequence of these tokens, in order; at least one token is left to run, for its logits are needed."""
        pages, before, size = [], 0, self.page_size
        while (len(pages) + 1) * size + max(self.lookahead, 1) <= len(token_ids):
            start = len(pages) * size
            page = self._index.get(_Entry(before, tuple(token_ids[start : start + size + self.lookahead])))
            if page is None:
                break
            pages.append(page)
            before = self._numbers[page]
        for page in pages:
            self._holders[page] += 1
            self._cached.pop(page, None)
        return pages

    def register(self, token_ids: Sequence[int], pages: Sequence[int], rows: int) -> None:
        """Index the pages of a sequence whose first `rows` rows are final in every cache. token_ids: of the sequence, as far as they are known."""
        before, size = 0, self.page_size
        for i, page in enumerate(pages[: min(rows // size, (len(token_ids) - self.lookahead) // size)]):
            entry = _Entry(before, tuple(token_ids[i * size : (i + 1) * size + self.lookahead]))
            known = self._index.get(entry)
            if known is None:
                if page in self._entries:
                    self._unindex(page)  # It was indexed after a page that has been evicted since, where nobody could find it.
                self._index[entry], self._entries[page], self._numbers[page] = page, entry, self._next_number
                self._next_number += 1
                known = page
            before = self._numbers[known]

    def _unindex(self, page: int) -> None:
        del self._index[self._entries.pop(page)], self._numbers[page]


def make_kv_cache(num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """[layers, 2, pages + 1, page_size, kv_heads, head_dim], uninitialised: memory is used as pages are first written. The last page, of zeros, is where slots without a sequence write."""
    cache = torch.empty(num_layers, 2, num_pages + 1, page_size, kv_heads, head_dim, dtype=dtype, device=device)
    cache[:, :, num_pages] = 0
    return cache
