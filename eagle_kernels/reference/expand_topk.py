"""Reference of expand_topk: one frontier node at a time."""

import math

import torch

from eagle_kernels.types import DraftPool, Frontier, HeadTopK

from .expand import best_by_score
from .fp32_math import fma, fp32_exp
from .gumbel_noise import _log as fp32_log

PADDING_KEY = -(2**63)
NUM_SUMS = 256


def expand_topk(
    head: HeadTopK,
    frontier_scores: torch.Tensor,
    frontier_pool_index: torch.Tensor,
    features: torch.Tensor,
    frontier_mask: torch.Tensor,
    pool: DraftPool,
    pool_offset: int,
    top_k: int,
    *,
    first_row: int,
    next_size: int,
    draft_to_target: torch.Tensor | None = None,
    choices: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    depth: int = 0,
    position_ids: torch.Tensor | None = None,
) -> Frontier:
    """Put the top_k children of each frontier node into the pool; the best of them are the next frontier.

    head                 HeadTopK [B, F, tiles, top_k]
    frontier_scores      [B, F] fp32
    frontier_pool_index  [B, F] int32; -1 = the root
    features             [B, F, H] fp32, bf16 or fp16
    frontier_mask        [B, F, W] int64
    pool                 [B, P] each   modified: slots pool_offset + f * top_k + r
    draft_to_target      [Vd] int64, target id of each draft id; None = the same
    choices              [next_size] int32, candidates f * top_k + r of the next frontier; None = by score
    position_ids         [B, next_size] int64 or None   modified: seq_lens [B] int32 + depth
    returns              Frontier of next_size nodes, node j at tentative row first_row + j

    children of f: the top_k greatest keys of all tiles; a padding key is token -1 with logit -inf
    score = frontier_score + min(0, logit - log_sum_exp), every operation in fp32
    next frontier: next_size candidates by (score desc, index asc); mask row = parent's row + own bit
    """
    batch, frontier_size, _, _ = head.keys.shape
    num_candidates = frontier_size * top_k
    next_frontier = Frontier(
        tokens=torch.empty(batch, next_size, dtype=torch.int64),
        scores=torch.empty(batch, next_size, dtype=torch.float32),
        pool_index=torch.empty(batch, next_size, dtype=torch.int32),
        features=torch.empty(batch, next_size, features.shape[2], dtype=features.dtype),
        mask=torch.empty(batch, next_size, frontier_mask.shape[2], dtype=torch.int64),
    )
    for b in range(batch):
        for f in range(frontier_size):
            greatest, log_sum_exp = row_statistics(head.max[b, f], head.sum_exp[b, f])
            for r, key in enumerate(sorted(head.keys[b, f].flatten().tolist(), reverse=True)[:top_k]):
                slot = pool_offset + f * top_k + r
                pool.tokens[b, slot] = token_of(key, draft_to_target)
                pool.scores[b, slot] = score_of(frontier_scores[b, f], logit_of(key), greatest, log_sum_exp)
                pool.parents[b, slot] = frontier_pool_index[b, f]

        if choices is not None:
            chosen = choices.tolist()
        else:
            chosen = best_by_score(pool.scores[b, pool_offset : pool_offset + num_candidates].tolist(), next_size)
        if position_ids is not None:
            position_ids[b] = int(seq_lens[b]) + depth
        for j, candidate in enumerate(chosen):
            f, slot, row = candidate // top_k, pool_offset + candidate, first_row + j
            next_frontier.tokens[b, j] = pool.tokens[b, slot]
            next_frontier.scores[b, j] = pool.scores[b, slot]
            next_frontier.pool_index[b, j] = slot
            next_frontier.features[b, j] = features[b, f]
            next_frontier.mask[b, j] = frontier_mask[b, f]
            next_frontier.mask[b, j, row // 64] |= torch.tensor(1) << (row % 64)
    return next_frontier


def row_statistics(tile_max: torch.Tensor, tile_sum_exp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit of a row and its log-sum-exp (0 when the greatest is infinite).

    sums[j] = 0, then a fused multiply-add for each tile t = j, j + 256, ...: sums[j] += sum_exp[t] * exp(max[t] - greatest);  then sums[j] += sums[j + 128], + 64, ..., + 1
    """
    greatest = tile_max.max()
    if greatest.isinf():
        return greatest, torch.tensor(0.0)
    sums = torch.zeros(NUM_SUMS)
    for t in range(0, tile_max.shape[0], NUM_SUMS):
        weights = fp32_exp(tile_max[t : t + NUM_SUMS] - greatest)
        sums[: len(weights)] = fma(tile_sum_exp[t : t + NUM_SUMS], weights, sums[: len(weights)])
    width = NUM_SUMS // 2
    while width > 0:
        sums[:width] = sums[:width] + sums[width : 2 * width]
        width //= 2
    return greatest, greatest + fp32_log(sums[:1])[0]


def token_of(key: int, draft_to_target: torch.Tensor | None) -> int:
    """The target token of a key; -1 for padding and for an id outside draft_to_target."""
    if key == PADDING_KEY:
        return -1
    draft_id = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    if draft_to_target is None:
        return draft_id
    return int(draft_to_target[draft_id]) if draft_id < len(draft_to_target) else -1


def logit_of(key: int) -> torch.Tensor:
    """The logit of a key; -inf for padding."""
    if key == PADDING_KEY:
        return torch.tensor(-math.inf)
    high = key >> 32
    return torch.tensor(high ^ ((high >> 31) & 0x7FFFFFFF), dtype=torch.int32).view(torch.float32)


def score_of(parent_score: torch.Tensor, logit: torch.Tensor, greatest: torch.Tensor, log_sum_exp: torch.Tensor) -> torch.Tensor:
    """The score of a child in fp32; every NaN is the same one, so that bits can be compared."""
    if greatest == math.inf:  # it has all the probability
        log_prob = torch.tensor(0.0 if logit == math.inf else -math.inf)
    elif logit == -math.inf:
        log_prob = torch.tensor(-math.inf)
    else:
        log_prob = (logit - log_sum_exp).clamp(max=0.0)
    score = parent_score + log_prob
    return torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32) if score.isnan() else score
