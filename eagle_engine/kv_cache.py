"""The paged KV cache: a pool of pages, one page table for target and drafter alike."""

from __future__ import annotations

import torch
from torch import Tensor


class PagePool:
    """Pages that sequences take and give back; page ids are the same in every cache that shares the pool."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has made sure that there are as many."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


def make_kv_cache(num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """[layers, 2, pages + 1, page_size, kv_heads, head_dim], uninitialised: memory is used as pages are first written. The last page, of zeros, is where slots without a sequence write."""
    cache = torch.empty(num_layers, 2, num_pages + 1, page_size, kv_heads, head_dim, dtype=dtype, device=device)
    cache[:, :, num_pages] = 0
    return cache
