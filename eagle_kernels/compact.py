"""The accepted rows of a tree moved next to the committed rows."""

from torch import Tensor

from eagle_kernels._extension import OPS


def compact(kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, accepted_nodes: Tensor, num_accepted_drafts: Tensor) -> None:
    """Move the accepted rows of this step's tree next to the committed rows, in place.

    kv_cache             [layers, 2, pages, page_size, kv_heads, head_dim], contiguous, any dtype; modified
    page_table           [B, max_pages] int32
    seq_lens             [B] int32, committed rows before this step
    accepted_nodes       [B, max_depth + 1] int32, root first, ascending, -1 after the end; a row that starts with -1 is left alone
    num_accepted_drafts  [B] int32

    For i in 0 .. num_accepted_drafts:  row[seq_len + i] = row[seq_len + accepted_nodes[i]]
    """
    OPS.compact(kv_cache, page_table, seq_lens, accepted_nodes, num_accepted_drafts)
