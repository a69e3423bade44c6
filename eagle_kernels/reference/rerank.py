"""Reference of rerank."""

import torch

from eagle_kernels.types import DraftPool, Tree

from .ancestor_mask import pack_ancestor_mask
from .expand import best_by_score


def rerank(
    pool: DraftPool,
    root_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_nodes: int,
    *,
    choices: torch.Tensor | None = None,
) -> Tree:
    """The tree to verify: the root and the num_nodes - 1 best candidates of the pool.

    pool         [B, P] each
    root_tokens  [B] int64
    seq_lens     [B] int32, committed rows
    choices      [num_nodes - 1] int32, ascending pool indices; None = by score
    returns      Tree of num_nodes nodes

    best by (score desc, pool index asc; NaN = -inf), listed in ascending pool index behind the root
    """
    batch = root_tokens.shape[0]
    tree = Tree(
        tokens=torch.empty(batch, num_nodes, dtype=torch.int64),
        parent=torch.empty(batch, num_nodes, dtype=torch.int32),
        depth=torch.empty(batch, num_nodes, dtype=torch.int32),
        packed_ancestor_mask=torch.empty(batch, num_nodes, (num_nodes + 63) // 64, dtype=torch.int64),
        position_ids=torch.empty(batch, num_nodes, dtype=torch.int64),
    )
    for b in range(batch):
        if choices is not None:
            selected = choices.tolist()
        else:
            selected = sorted(best_by_score(pool.scores[b].tolist(), num_nodes - 1))
        node_of_slot = {-1: 0} | {slot: node for node, slot in enumerate(selected, start=1)}

        tree.tokens[b, 0], tree.parent[b, 0], tree.depth[b, 0] = root_tokens[b], -1, 0
        ancestor_mask = torch.eye(num_nodes, dtype=torch.bool)
        for node, slot in enumerate(selected, start=1):
            parent = node_of_slot[int(pool.parents[b, slot])]
            tree.tokens[b, node] = pool.tokens[b, slot]
            tree.parent[b, node] = parent
            tree.depth[b, node] = tree.depth[b, parent] + 1
            ancestor_mask[node] |= ancestor_mask[parent]
        tree.packed_ancestor_mask[b] = pack_ancestor_mask(ancestor_mask)
        tree.position_ids[b] = int(seq_lens[b]) + tree.depth[b].long()
    return tree
