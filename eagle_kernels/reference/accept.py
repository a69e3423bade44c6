"""Reference of accept."""

import torch

from eagle_kernels.types import Accepted


def accept(
    tokens: torch.Tensor, parent: torch.Tensor, sampled: torch.Tensor, active: torch.Tensor, max_depth: int
) -> Accepted:
    """Follow the target's own tokens down the tree as far as it has them.

    tokens   [B, N] int64; a token below 0 matches nothing
    parent   [B, N] int32
    sampled  [B, N] int64, the target's token after each node
    active   [B] bool; inactive rows give all -1, 0 and -1
    returns  Accepted of paths up to max_depth

    node = 0; while some child of node has token sampled[node]: node = the first such child
    bonus = sampled[node]
    """
    batch, num_nodes = tokens.shape
    accepted = no_paths(batch, max_depth)
    for b in range(batch):
        if not active[b]:
            continue
        path, child = [], 0
        while child is not None:
            node = child
            path.append(node)
            if len(path) > max_depth:
                break
            child = next(
                (
                    c
                    for c in range(1, num_nodes)
                    if parent[b, c] == node and tokens[b, c] >= 0 and tokens[b, c] == sampled[b, node]
                ),
                None,
            )
        set_path(accepted, b, path, int(sampled[b, path[-1]]))
    return accepted


def no_paths(batch: int, max_depth: int) -> Accepted:
    """What inactive rows hold."""
    return Accepted(
        accepted_nodes=torch.full((batch, max_depth + 1), -1, dtype=torch.int32),
        num_accepted_drafts=torch.zeros(batch, dtype=torch.int32),
        bonus_token=torch.full((batch,), -1, dtype=torch.int64),
    )


def set_path(accepted: Accepted, b: int, path: list[int], bonus_token: int) -> None:
    """Write row b: the accepted nodes, root first, and the token after them."""
    accepted.accepted_nodes[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
    accepted.num_accepted_drafts[b] = len(path) - 1
    accepted.bonus_token[b] = bonus_token
