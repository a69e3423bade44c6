"""Attention of a long piece of a prompt on CUDA, through flash-attn where it is installed; everything else goes through eagle_kernels.tree_attention."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
from torch import Tensor

MAX_TREE_QUERIES = 256  # of eagle_kernels.tree_attention
LONG_CHUNK = 4096  # prompt tokens of a forward with flash-attn: enough to be bound by arithmetic, and activations stay below 1 GB for 8B shapes


@functools.cache
def has_flash_attn() -> bool:
    """Whether flash_attn is installed, with the function that is used here."""
    return importlib.util.find_spec("flash_attn") is not None and hasattr(importlib.import_module("flash_attn"), "flash_attn_func")


def longest_chunk(device: torch.device, deterministic: bool, chunk: int) -> int:
    """Prompt tokens of one forward. flash-attn chooses its splits by shape, so deterministic engines do not use it."""
    return max(chunk, LONG_CHUNK) if device.type == "cuda" and not deterministic and has_flash_attn() else chunk


def prefill_attention(q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_len: int, *, window: int = 0, out: Tensor) -> Tensor:
    """Causal attention of Q rows of one sequence over its seq_len committed rows and themselves; other arguments as tree_attention with B = 1 and no mask.

    The cache's rows are copied together first: flash-attn reads pages only in multiples of 256 rows.
    """
    if q.shape[0] != 1:
        raise ValueError(f"q: expected one sequence, got {q.shape[0]}")
    length = seq_len + q.shape[1]
    page_size = kv_cache.shape[2]
    pages = page_table[0, : -(-length // page_size)].long()
    keys, values = kv_cache[:, pages].flatten(1, 2)[:, None, :length]
    flash_attn = importlib.import_module("flash_attn")
    # A key at distance `window` is not seen; flash-attn counts the keys to the left.
    out.copy_(flash_attn.flash_attn_func(q, keys, values, softmax_scale=q.shape[-1] ** -0.5, causal=True, window_size=(window - 1, 0) if window > 0 else (-1, -1)))
    return out
