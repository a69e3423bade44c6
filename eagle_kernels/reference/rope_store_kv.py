"""Reference of rope_store_kv."""

import torch


def rope_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_ids: torch.Tensor,
    rope_table: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    row_offset: int = 0,
) -> None:
    """Rotate the queries in place; write the rotated keys and the values into the cache.

    q             [B, Q, Hq, D]   modified
    k, v          [B, Q, Hkv, D]
    position_ids  [B, Q] int64
    rope_table    [max_positions, D], cat(cos, sin) of D / 2 angles each
    kv_cache      [2, pages, page_size, Hkv, D]   modified
    page_table    [B, max_pages] int32
    seq_lens      [B] int32, committed rows

    tentative row row_offset + i, that is logical row seq_len + row_offset + i, gets (rotated k[i], v[i])
    """
    batch, num_queries = position_ids.shape
    page_size = kv_cache.shape[2]
    for b in range(batch):
        for i in range(num_queries):
            cos, sin = rope_table[position_ids[b, i]].chunk(2)
            row = int(seq_lens[b]) + row_offset + i
            page, slot = int(page_table[b, row // page_size]), row % page_size
            q[b, i] = rotate(q[b, i], cos, sin)
            kv_cache[0, page, slot] = rotate(k[b, i], cos, sin).to(kv_cache.dtype)
            kv_cache[1, page, slot] = v[b, i].to(kv_cache.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [H, D], cos and sin [D / 2]: rotate the pairs (x[j], x[j + D / 2])."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
