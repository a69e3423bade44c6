"""Reference of tree_attention: one query at a time over its gathered rows."""

import torch

from .ancestor_mask import unpack_ancestor_mask


def tree_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    packed_ancestor_mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of Q tentative queries over the committed rows and their ancestors among the tentative rows.

    q                     [B, Q, Hq, D]; the result is computed in its dtype (float64 makes an oracle)
    kv_cache              [2, pages, page_size, Hkv, D]; head h reads KV head h // (Hq / Hkv)
    page_table            [B, max_pages] int32
    seq_lens              [B] int32, committed rows
    packed_ancestor_mask  [B, Q, W] int64; None: query i sees the tentative rows 0..i
    returns               out [B, Q, Hq, D], with return_lse also lse [B, Q, Hq], natural log

    keys = committed rows, then ancestors ascending; key k stands at position k, the query at the last one
    key k is visible iff window == 0 or query_position - k < window
    out = softmax(cap(scale * q . keys)) . values; no key: zeros and -inf
    """
    batch, num_queries, num_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_cache.shape[2], kv_cache.shape[3]
    if scale is None:
        scale = head_dim**-0.5
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(batch, num_queries, num_heads, dtype=q.dtype)

    for b in range(batch):
        seq_len = int(seq_lens[b])
        for i in range(num_queries):
            if packed_ancestor_mask is None:
                ancestors = list(range(i + 1))
            else:
                ancestors = unpack_ancestor_mask(packed_ancestor_mask[b, i]).nonzero().flatten().tolist()
            rows = list(range(seq_len)) + [seq_len + a for a in ancestors]
            query_position = seq_len + len(ancestors) - 1
            if window > 0:
                rows = [row for position, row in enumerate(rows) if query_position - position < window]
            if not rows:
                out[b, i] = 0.0
                lse[b, i] = -torch.inf
                continue

            index = torch.tensor(rows)
            pages, slots = page_table[b, index // page_size].long(), index % page_size
            keys = kv_cache[0, pages, slots].to(q.dtype)  # [L, Hkv, D]
            values = kv_cache[1, pages, slots].to(q.dtype)
            grouped = q[b, i].reshape(num_kv_heads, -1, head_dim)  # [Hkv, group, D]
            scores = scale * (grouped @ keys.permute(1, 2, 0))  # [Hkv, group, L]
            if soft_cap > 0:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[b, i] = (scores.softmax(-1) @ values.transpose(0, 1)).reshape(num_heads, head_dim)
            lse[b, i] = scores.logsumexp(-1).flatten()
    return (out, lse) if return_lse else out
