"""The draft pool's best nodes as a tree (EAGLE-2: Li et al., 2024, section 4.2)."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.types import DraftPool, Tree


def rerank(pool: DraftPool, root_tokens: Tensor, seq_lens: Tensor, num_nodes: int, *, choices: Tensor | None = None) -> Tree:
    """The root and the num_nodes - 1 best candidates, parents before children.

    pool         DraftPool [B, P]
    root_tokens  [B] int64
    seq_lens     [B] int32
    num_nodes    1 to min(P + 1, 256)
    choices      [num_nodes - 1] int32 ascending pool indices (static trees), or None: the best by (score descending, pool index ascending), NaN as -inf
    returns      Tree [B, num_nodes]; after the root the nodes stand in ascending pool index

    Since no child outranks its parent and it stands after it, a chosen node's parent is always chosen. ValueError for a pool of which that is not true.
    """
    batch = root_tokens.shape[0]
    device = root_tokens.device
    tree = Tree(
        torch.empty(batch, num_nodes, dtype=torch.int64, device=device),
        torch.empty(batch, num_nodes, dtype=torch.int32, device=device),
        torch.empty(batch, num_nodes, dtype=torch.int32, device=device),
        torch.empty(batch, num_nodes, (num_nodes + 63) // 64, dtype=torch.int64, device=device),
        torch.empty(batch, num_nodes, dtype=torch.int64, device=device),
    )
    OPS.rerank(*pool, root_tokens, seq_lens, choices, *tree)
    return tree
