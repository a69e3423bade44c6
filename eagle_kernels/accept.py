"""Which drafts the target keeps."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.types import Accepted


def accept(
    tokens: Tensor,
    parent: Tensor,
    sampled: Tensor,
    active: Tensor,
    max_depth: int,
    *,
    stop_token_ids: Tensor | None = None,
    output_ring: Tensor | None = None,
) -> Accepted:
    """Walk down from the root as long as a child carries the token that the target drew.

    tokens          [B, N] int64; a token below 0 is never accepted
    parent          [B, N] int32, parent[i] < i; root -1
    sampled         [B, N] int64, the token drawn after each node
    active          [B] bool; modified: a row that emits a stop token becomes inactive
    stop_token_ids  [B, S] int64, -1 = none, or None
    output_ring     [B, C + 1] int64, C > max_depth, or None; modified: token number n that a sequence emits is put at column n % C, the last column counts the emitted tokens
    returns         Accepted [B, max_depth + 1]; of an inactive row -1, 0, -1, and its ring stays as it is

    node = 0; while sampled[node] is no stop token and a child c of node has tokens[c] == sampled[node]: node = the smallest such c;  bonus_token = sampled[node]

    The tokens emitted are the accepted drafts in order, then the bonus token. So the first stop token is always the bonus token, and the drafts that would follow it are cut.
    """
    result = empty_accepted(tokens, max_depth)
    OPS.accept(tokens, parent, sampled, active, stop_token_ids, output_ring, *result)
    return result


def accept_rejection(
    tokens: Tensor, parent: Tensor, target_probs: Tensor, draft_probs: Tensor, seeds: Tensor, positions: Tensor, active: Tensor, max_depth: int
) -> Accepted:
    """Rejection sampling for children drawn without replacement, several rounds per node (Leviathan et al., 2023; SpecInfer: Miao et al., 2024).

    tokens        [B, N] int64; a token below 0 is passed over
    parent        [B, N] int32
    target_probs  [B, N, V] fp32, the target's filtered distribution after each node
    draft_probs   [B, N, V] fp32, the distribution that the children of each node were drawn from
    seeds         [B] int64
    positions     [B] int64, absolute position of the token after the root
    active        [B] bool
    returns       Accepted [B, max_depth + 1]

    At a node p = target_probs, q = draft_probs; children in order: accept x when r q[x] < p[x] (strict), else p = normalise(max(0, p - q)), q[x] = 0, q = normalise(q).
    Without an accepted child the bonus token is drawn from p.
    """
    result = empty_accepted(tokens, max_depth)
    OPS.accept_rejection(tokens, parent, target_probs, draft_probs, seeds, positions, active, *result)
    return result


def empty_accepted(tokens: Tensor, max_depth: int) -> Accepted:
    """Uninitialised result for `accept`: B sequences, paths of up to max_depth drafts."""
    batch, device = tokens.shape[0], tokens.device
    return Accepted(
        torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )
