"""One level of the draft tree (EAGLE-2: Li et al., 2024, section 4.1)."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.types import DraftPool, Frontier, HeadTopK


def expand(
    logits: Tensor,
    frontier_scores: Tensor,
    frontier_pool_index: Tensor,
    features: Tensor,
    frontier_mask: Tensor,
    pool: DraftPool,
    pool_offset: int,
    top_k: int,
    *,
    first_row: int,
    next_size: int,
    draft_to_target: Tensor | None = None,
    choices: Tensor | None = None,
) -> Frontier:
    """The top_k continuations of every frontier node into the pool, and the best of them as the next frontier. CPU; on CUDA `expand_topk` of `logits_topk`.

    logits               [B, F, Vd] fp32, last dimension contiguous
    frontier_scores      [B, F] fp32
    frontier_pool_index  [B, F] int32; root -1
    features             [B, F, H] fp32, of the frontier nodes
    frontier_mask        [B, F, W] int64
    pool                 DraftPool [B, P]; candidates f * top_k + r are written at pool_offset + f * top_k + r
    top_k                at most 64
    first_row            tentative row of the first node of the next frontier
    next_size            nodes of the next frontier, 0 to F * top_k
    draft_to_target      [Vd] int64, target id of each draft id, or None
    choices              [next_size] int32, candidates that form the next frontier (static trees), or None: the best by (score descending, index ascending)
    returns              Frontier of next_size nodes, with the features of their parents

    score = frontier_score + log-softmax(logits)[token], in fp32, never above the parent's. Per row the order is (logit descending, id ascending), NaN counts as -inf.
    """
    frontier = empty_frontier(features, frontier_mask, next_size)
    OPS.expand(logits, frontier_scores, frontier_pool_index, features, frontier_mask, *pool, pool_offset, top_k, first_row, draft_to_target, choices, *frontier)
    return frontier


def expand_topk(
    head: HeadTopK,
    frontier_scores: Tensor,
    frontier_pool_index: Tensor,
    features: Tensor,
    frontier_mask: Tensor,
    pool: DraftPool,
    pool_offset: int,
    top_k: int,
    *,
    first_row: int,
    next_size: int,
    draft_to_target: Tensor | None = None,
    choices: Tensor | None = None,
    seq_lens: Tensor | None = None,
    depth: int = 0,
    position_ids: Tensor | None = None,
) -> Frontier:
    """`expand` from what `head_topk` kept of the logits; the same bits on every backend. CUDA: one launch.

    head                 HeadTopK [B, F, tiles, top_k], at most 64 frontier nodes and 4096 tiles
    frontier_scores      [B, F] fp32
    frontier_pool_index  [B, F] int32; root -1
    features             [B, F, H] fp32, bf16 or fp16, last dimension contiguous
    frontier_mask        [B, F, W] int64
    pool                 DraftPool [B, P]; candidates f * top_k + r are written at pool_offset + f * top_k + r
    top_k                at most 64
    first_row            tentative row of the first node of the next frontier
    next_size            nodes of the next frontier, 0 to F * top_k
    draft_to_target      [Vd] int64, target id of each draft id, or None; an id outside it gives token -1
    choices              [next_size] int32, candidates that form the next frontier (static trees), or None: the best by (score descending, index ascending). On CUDA they are not
                         checked but clamped
    seq_lens, depth      [B] int32 and a number, with position_ids
    position_ids         [B, next_size] int64 or None; modified: seq_len + depth, the positions of the next frontier
    returns              Frontier of next_size nodes, with the features of their parents in their dtype

    score = frontier_score + min(0, logit - lse);  lse = M + log(sum of sum_exp[t] exp(max[t] - M)), M = max over tiles, the sum in the fixed order that the reference states.
    Where fewer than top_k keys are no padding, the children that are missing have token -1 and log-probability -inf. A score that is NaN has the bits 0x7FC00000.
    """
    frontier = empty_frontier(features, frontier_mask, next_size)
    OPS.expand_topk(*head, frontier_scores, frontier_pool_index, features, frontier_mask, *pool, pool_offset, top_k, first_row, draft_to_target, choices, seq_lens, depth, *frontier, position_ids)
    return frontier


def empty_frontier(features: Tensor, frontier_mask: Tensor, next_size: int) -> Frontier:
    """Uninitialised frontier of next_size nodes, with features like `features` [B, F, H] and masks like `frontier_mask` [B, F, W]."""
    batch, device = features.shape[0], features.device
    return Frontier(
        torch.empty(batch, next_size, dtype=torch.int64, device=device),
        torch.empty(batch, next_size, dtype=torch.float32, device=device),
        torch.empty(batch, next_size, dtype=torch.int32, device=device),
        torch.empty(batch, next_size, features.shape[-1], dtype=features.dtype, device=device),
        torch.empty(batch, next_size, frontier_mask.shape[-1], dtype=torch.int64, device=device),
    )
