"""Reference of compact."""

import torch


def compact(
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    num_accepted_drafts: torch.Tensor,
) -> None:
    """Move the accepted rows of this step's tree next to the committed rows, in place.

    kv_cache             [layers, 2, pages, page_size, kv_heads, head_dim]   modified
    page_table           [B, max_pages] int32
    seq_lens             [B] int32, committed rows before this step
    accepted_nodes       [B, max_depth + 1] int32, root first, ascending, -1 after the end
    num_accepted_drafts  [B] int32

    for i in 0..num_accepted_drafts: row[seq_len + i] = row[seq_len + accepted_nodes[i]]
    a row of accepted_nodes that starts with -1 is inactive: nothing moves
    """
    page_size = kv_cache.shape[3]
    for b in range(seq_lens.shape[0]):
        if accepted_nodes[b, 0] < 0:
            continue
        seq_len = int(seq_lens[b])
        # Nodes ascend, so node i >= i: a row is read before any later move overwrites it.
        for i in range(int(num_accepted_drafts[b]) + 1):
            source, destination = seq_len + int(accepted_nodes[b, i]), seq_len + i
            source_page, destination_page = (int(page_table[b, row // page_size]) for row in (source, destination))
            kv_cache[:, :, destination_page, destination % page_size] = kv_cache[
                :, :, source_page, source % page_size
            ]
