"""Attention of tree nodes over a paged prefix and their own ancestors."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS


def tree_attention(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    packed_ancestor_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention; serves verify, draft levels, plain decoding and chunked prefill.

    q                     [B, Q, q_heads, D] fp32, last dimension contiguous. CUDA: bf16 or fp16; D 64, 80, 96, 128 or 256; Q <= 256
    kv_cache              one layer's [2, pages, page_size, kv_heads, D], fp32 or bf16. CUDA: q's dtype, page_size a power of two
    page_table            [B, max_pages] int32
    seq_lens              [B] int32, committed rows; tentative row t is logical row seq_lens + t
    packed_ancestor_mask  [B, Q, W] int64, bit j of word j // 64: the query sees tentative row j; W <= 4. None: a causal chunk, query i sees tentative rows 0 .. i, Q <= 256
    scale                 default D^-0.5
    window                > 0: a key at position p is visible iff position - p < window, a query's position being seq_len + popcount(mask row) - 1
    soft_cap              > 0: scores become soft_cap * tanh(score / soft_cap)
    deterministic         CUDA: row-invariant, at some cost; the CPU always is
    returns               as q; with return_lse also the natural log-sum-exp [B, Q, q_heads] fp32. A query without keys gives zeros and -inf

    Row-invariant (CPU, and CUDA when deterministic): keys are visited in logical order (the prefix, then the ancestors by depth) in blocks with boundaries at fixed positions (CPU: multiples of 64),
    so a row's bits do not depend on the tree, the batch or the chunk. Without `deterministic`, CUDA splits the prefix evenly over the chip instead.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if return_lse else None
    OPS.tree_attention(q, kv_cache, page_table, seq_lens, packed_ancestor_mask, q.shape[-1] ** -0.5 if scale is None else scale, window, soft_cap, deterministic, out, lse)
    return (out, lse) if return_lse else out
