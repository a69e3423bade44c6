"""Draft pools and trees as a step leaves them, for the benchmarks of the tree ops."""

from __future__ import annotations

import random

import torch
from cases import Tree
from torch import Tensor

from eagle_kernels import DraftPool
from eagle_kernels import Tree as TreeTensors
from eagle_kernels import rerank

PREFIX = 1024


def pool_size(tree: Tree) -> int:
    return tree.top_k + (tree.max_depth - 1) * tree.top_k**2


def draft_pool(tree: Tree, vocab: int) -> DraftPool:
    """Scores fall along every path, as `expand` writes them; the first top_k candidates of a level are the next frontier."""
    k, size = tree.top_k, pool_size(tree)
    parents, scores = [-1] * size, [0.0] * size
    for i in range(size):
        level = 0 if i < k else 1 + (i - k) // (k * k)
        before = 0 if level < 2 else k + (level - 2) * k * k
        parents[i] = -1 if level == 0 else before + (i - k) % (k * k) // k
        scores[i] = (0.0 if parents[i] < 0 else scores[parents[i]]) - random.random() - 0.01
    return DraftPool(torch.randint(vocab, (1, size)), torch.tensor([scores]), torch.tensor([parents], dtype=torch.int32))


def reranked(tree: Tree, vocab: int) -> TreeTensors:
    """On the CPU."""
    return rerank(draft_pool(tree, vocab), torch.tensor([5]), torch.tensor([PREFIX], dtype=torch.int32), tree.nodes)


def longest_walk(tree: TreeTensors) -> Tensor:
    """sampled [1, N]: the target draws the first child everywhere."""
    sampled = torch.full_like(tree.tokens, -2)
    for node in range(tree.tokens.shape[1] - 1, 0, -1):
        sampled[0, tree.parent[0, node]] = tree.tokens[0, node]
    return sampled


def ancestor_mask(nodes: int) -> Tensor:
    """Of a random tree, [1, nodes, nodes]: a row is its parent's row and itself."""
    pick, mask = random.Random(nodes), torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[pick.randrange(node)]
    return mask[None]
