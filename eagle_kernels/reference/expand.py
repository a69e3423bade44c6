"""Reference of expand: one frontier node at a time."""

import math

import torch

from eagle_kernels.types import DraftPool, Frontier


def expand(
    logits: torch.Tensor,
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
) -> Frontier:
    """Put the top_k children of each frontier node into the pool; the best of them are the next frontier.

    logits               [B, F, Vd] fp32, of the frontier's draft forward
    frontier_scores      [B, F] fp32
    frontier_pool_index  [B, F] int32; -1 = the root
    features             [B, F, H] fp32, of the frontier's draft forward
    frontier_mask        [B, F, W] int64
    pool                 [B, P] each   modified: slots pool_offset + f * top_k + r
    draft_to_target      [Vd] int64, target id of each draft id; None = the same
    choices              [next_size] int32, candidates f * top_k + r of the next frontier; None = by score
    returns              Frontier of next_size nodes, node j at tentative row first_row + j

    children of f: top_k draft ids by (logit desc, id asc); NaN counts as -inf
    score = frontier_score + min(0, log_softmax(logits)[id])
    next frontier: next_size candidates by (score desc, index asc); mask row = parent's row + own bit
    """
    batch, frontier_size, _ = logits.shape
    num_words = frontier_mask.shape[2]
    next_frontier = Frontier(
        tokens=torch.empty(batch, next_size, dtype=torch.int64),
        scores=torch.empty(batch, next_size, dtype=torch.float32),
        pool_index=torch.empty(batch, next_size, dtype=torch.int32),
        features=torch.empty(batch, next_size, features.shape[2], dtype=features.dtype),
        mask=torch.empty(batch, next_size, num_words, dtype=torch.int64),
    )
    for b in range(batch):
        for f in range(frontier_size):
            for r, (draft_id, log_prob) in enumerate(best_children(logits[b, f].tolist(), top_k)):
                slot = pool_offset + f * top_k + r
                token = draft_id if draft_to_target is None else int(draft_to_target[draft_id])
                pool.tokens[b, slot] = token
                pool.scores[b, slot] = torch.tensor(float(frontier_scores[b, f]) + min(0.0, log_prob), dtype=torch.float64).float()
                pool.parents[b, slot] = frontier_pool_index[b, f]

        num_candidates = frontier_size * top_k
        if choices is not None:
            chosen = choices.tolist()
        else:
            chosen = best_by_score(pool.scores[b, pool_offset : pool_offset + num_candidates].tolist(), next_size)
        for j, candidate in enumerate(chosen):
            f, slot, row = candidate // top_k, pool_offset + candidate, first_row + j
            next_frontier.tokens[b, j] = pool.tokens[b, slot]
            next_frontier.scores[b, j] = pool.scores[b, slot]
            next_frontier.pool_index[b, j] = slot
            next_frontier.features[b, j] = features[b, f]
            next_frontier.mask[b, j] = frontier_mask[b, f]
            next_frontier.mask[b, j, row // 64] |= torch.tensor(1) << (row % 64)
    return next_frontier


def best_children(logits: list[float], top_k: int) -> list[tuple[int, float]]:
    """The top_k (draft id, log-probability) of one row."""
    logits = [-math.inf if math.isnan(value) else value for value in logits]
    ids = best_by_score(logits, top_k)
    largest = logits[ids[0]]
    if math.isinf(largest):  # all -inf: nothing has probability; +inf: it has it all
        return [(i, 0.0 if logits[i] == math.inf else -math.inf) for i in ids]
    log_sum = math.log(math.fsum(math.exp(value - largest) for value in logits))
    return [(i, logits[i] - largest - log_sum) for i in ids]


def best_by_score(scores: list[float], count: int) -> list[int]:
    """The first `count` indices by (score desc, index asc); NaN counts as -inf."""
    scores = [-math.inf if math.isnan(score) else score for score in scores]
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
