"""What a step did, for people: each sequence's tree with the drafter's scores, the target's choices and the accepted path. A step pays for none of this unless someone observes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_engine.tree_shape import TreeShape
from eagle_kernels import Accepted, DraftPool, Tree


@dataclass(frozen=True)
class ObservedTree:
    """One sequence's tree in one step. Lists have an entry per node, parents before children; node 0 is the root.

    tokens          token ids; -1: the drafter had no further candidate
    parent          the parent's node; root -1
    depth           root 0
    scores          cumulative draft log-probability; root 0. Log-probabilities are those of the drafter's own vocabulary (with `draft_vocab`, of the tokens that it may guess)
    sampled         the token that the target draws after the node, -1 where its logits are not usable; None with acceptance "rejection", which draws no token per node
    accepted_nodes  the accepted path, the root first
    bonus_token     the target's token after that path
    position        of the root in the sequence, prompt included: tokens before it
    """

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    scores: list[float]
    sampled: list[int] | None
    accepted_nodes: list[int]
    bonus_token: int
    position: int

    @property
    def emitted(self) -> list[int]:
        """Tokens that the step emitted: the accepted drafts, then the bonus token. The request may end before the last of them."""
        return [self.tokens[node] for node in self.accepted_nodes[1:]] + [self.bonus_token]

    @property
    def confidences(self) -> list[float]:
        """Per node the drafter's probability of its token given its path, exp(score - parent's score); root 1. NaN below a node whose own path has probability 0."""
        return [1.0] + [_ratio(self.scores[node], self.scores[self.parent[node]]) for node in range(1, len(self.tokens))]

    @property
    def path_confidences(self) -> list[float]:
        """Per node the drafter's probability of its whole path, exp(score); root 1."""
        return [math.exp(score) for score in self.scores]


# observer(request_ids, trees): called after each step with the running requests and, in the same order, their trees.
Observer = Callable[[list[int], list[ObservedTree]], None]


def observed_trees(shape: TreeShape, pool: DraftPool, tree: Tree, sampled: Tensor | None, accepted: Accepted) -> list[ObservedTree]:
    """The trees of a step, on the host.

    pool     [B, P], as `rerank` got it
    tree     [B, N], as `rerank` made it from the pool
    sampled  [B, N] int64, the target's token after each node, or None
    """
    scores = torch.zeros(tree.tokens.shape, dtype=torch.float32, device=tree.tokens.device)
    if shape.num_nodes > 1:
        chosen = chosen_candidates(pool, shape.num_nodes, shape.node_choices)
        if not torch.equal(pool.tokens.gather(1, chosen), tree.tokens[:, 1:]):
            raise AssertionError("the candidates that were found in the pool are not those of the tree")
        scores[:, 1:] = pool.scores.gather(1, chosen)
    nodes, parents, depths, values = (tensor.tolist() for tensor in (tree.tokens, tree.parent, tree.depth, scores))
    choices = [None] * len(nodes) if sampled is None else sampled.tolist()
    paths = [[node for node in path if node >= 0] for path in accepted.accepted_nodes.tolist()]
    bonus, positions = accepted.bonus_token.tolist(), tree.position_ids[:, 0].tolist()
    return [ObservedTree(*row) for row in zip(nodes, parents, depths, values, choices, paths, bonus, positions)]


def chosen_candidates(pool: DraftPool, num_nodes: int, choices: Tensor | None) -> Tensor:
    """Pool indices [B, num_nodes - 1] int64 of a tree's nodes after the root, by the rule of `rerank`: those of `choices`, or the best by (score descending, index ascending; NaN as -inf), ascending."""
    if choices is not None:
        return choices.long().expand(pool.tokens.shape[0], -1)
    order = pool.scores.masked_fill(pool.scores.isnan(), -math.inf).sort(dim=1, descending=True, stable=True).indices
    return order[:, : num_nodes - 1].sort(dim=1).values


def _ratio(score: float, parent_score: float) -> float:
    if score == -math.inf and parent_score > -math.inf:
        return 0.0
    return math.exp(score - parent_score) if math.isfinite(score) and math.isfinite(parent_score) else math.nan
