"""Reference of accept."""

import torch

from eagle_kernels.types import Accepted


def accept(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    sampled: torch.Tensor,
    active: torch.Tensor,
    max_depth: int,
    *,
    stop_token_ids: torch.Tensor | None = None,
    output_ring: torch.Tensor | None = None,
) -> Accepted:
    """Follow the target's own tokens down the tree as far as it has them.

    tokens          [B, N] int64; a token below 0 matches nothing
    parent          [B, N] int32
    sampled         [B, N] int64, the target's token after each node
    active          [B] bool; inactive rows give all -1, 0 and -1   modified: False once a stop token is emitted
    stop_token_ids  [B, S] int64, -1 padded
    output_ring     [B, C + 1] int64, C > max_depth   modified: the n-th token of a sequence at column n % C, the last column counts
    returns         Accepted of paths up to max_depth

    node = 0; while some child of node has token sampled[node]: node = the first such child
    bonus = sampled[node]
    emitted = tokens of the path without the root, then bonus; cut behind the first stop token, which becomes the bonus token
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
        emitted = [int(tokens[b, node]) for node in path[1:]] + [int(sampled[b, path[-1]])]
        stop_tokens = set() if stop_token_ids is None else set(stop_token_ids[b].tolist()) - {-1}
        for i, token in enumerate(emitted):
            if token in stop_tokens:
                path, emitted = path[: i + 1], emitted[: i + 1]
                active[b] = False
                break
        set_path(accepted, b, path, emitted[-1])
        if output_ring is not None:
            for token in emitted:
                output_ring[b, int(output_ring[b, -1]) % (output_ring.shape[1] - 1)] = token
                output_ring[b, -1] += 1
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
