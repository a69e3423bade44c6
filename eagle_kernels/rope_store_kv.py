"""Rotary embedding and the store of new keys and values into the paged cache."""

from torch import Tensor

from eagle_kernels._extension import OPS


def rope_store_kv(
    q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, rope_table: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, row_offset: int = 0
) -> None:
    """Rotate q in place; write the rotated k, and v, into the cache at tentative rows row_offset, row_offset + 1, ...

    q             [B, Q, q_heads, D] fp32 (CUDA: bf16 or fp16), last dimension contiguous; modified. No heads where nothing asks: keys and values are stored alone
    k, v          [B, Q, kv_heads, D] as q, last dimension contiguous
    position_ids  [B, Q] int64; positions outside the table use its nearest end (padding rows only: the engine sizes the table by the longest sequence)
    rope_table    [max_positions, D] fp32, cos of the D / 2 frequencies, then sin
    kv_cache      one layer's [2, pages, page_size, kv_heads, D], fp32 or bf16 (CUDA: q's dtype), contiguous; modified
    page_table    [B, max_pages] int32
    seq_lens      [B] int32

    With h = D / 2:  x'[j] = x[j] cos[j] - x[j + h] sin[j],  x'[j + h] = x[j + h] cos[j] + x[j] sin[j]
    """
    OPS.rope_store_kv(q, k, v, position_ids, rope_table, kv_cache, page_table, seq_lens, row_offset)
