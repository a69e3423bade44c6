"""The fixed part of a draft tree: which levels are drafted, and where their candidates stand in the pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_engine.config import EagleConfig


@dataclass(frozen=True)
class Level:
    """One draft level: `frontier` nodes are expanded into frontier * top_k candidates.

    pool_offset  place of its first candidate in the pool
    first_row    tentative row, in the drafter's cache, of the first node of the next frontier
    next_size    nodes of the next frontier; 0 at the last level
    choices      [next_size] int32, candidates that form the next frontier; None: the best by score
    """

    frontier: int
    pool_offset: int
    first_row: int
    next_size: int
    choices: Tensor | None


@dataclass(frozen=True)
class TreeShape:
    """A tree of num_nodes nodes, the root included, none deeper than max_depth; num_nodes 1 is plain decoding.

    node_choices     [num_nodes - 1] int32 ascending pool indices of a static tree; None: reranked by score
    frontier_nodes   per level the tree node of each frontier node (static trees), for the distributions of rejection sampling
    """

    num_nodes: int
    max_depth: int
    top_k: int
    levels: tuple[Level, ...]
    pool_size: int
    node_choices: Tensor | None = None
    frontier_nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def draft_rows(self) -> int:
        """Tentative rows that the draft levels use in the drafter's cache."""
        return sum(level.next_size for level in self.levels)

    @property
    def draft_mask_words(self) -> int:
        return max(1, (self.draft_rows + 63) // 64)


def on_device(shape: TreeShape, device: torch.device) -> TreeShape:
    """The shape with its tensors on a device."""
    levels = tuple(replace(level, choices=None if level.choices is None else level.choices.to(device)) for level in shape.levels)
    return replace(shape, levels=levels, node_choices=None if shape.node_choices is None else shape.node_choices.to(device))


PLAIN = TreeShape(num_nodes=1, max_depth=0, top_k=0, levels=(), pool_size=0)


def tree_shape(config: EagleConfig) -> TreeShape:
    """The shape that a configuration asks for; the largest of an adaptive tree. A chain is the static tree whose every node has one child."""
    if config.is_dynamic:
        return _dynamic(config.top_k, config.max_depth, config.num_nodes)
    if config.tree == "chain":
        return _static(tuple((0,) * depth for depth in range(1, config.max_depth + 1)))
    return _static(config.choices)


def tree_shapes(config: EagleConfig) -> tuple[TreeShape, ...]:
    """The shapes that a step may have: of an adaptive tree, plain decoding, then from shallow to deep three numbers of nodes for each depth; of any other tree, the one."""
    if config.tree != "adaptive":
        return (tree_shape(config),)
    shapes = [PLAIN]
    for depth in _spread(config.max_depth):
        pool = config.top_k + (depth - 1) * config.top_k**2
        most = min(config.num_nodes, pool + 1)
        # A chain; a node beside each of it; a bush.
        shapes += [_dynamic(config.top_k, depth, nodes) for nodes in sorted({min(size, most) for size in (depth + 1, 2 * depth + 1, 4 * depth)}) if nodes > depth]
    largest = tree_shape(config)
    return tuple(shapes) + (() if any((shape.max_depth, shape.num_nodes) == (largest.max_depth, largest.num_nodes) for shape in shapes) else (largest,))


def _spread(max_depth: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and max_depth: the deeper, the less a level more or less matters."""
    depths = [1, 2, 3] + [step << i for i in range(5) for step in (4, 6)]
    return [depth for depth in depths if depth < max_depth] + [max_depth]


def _dynamic(top_k: int, max_depth: int, num_nodes: int) -> TreeShape:
    if num_nodes == 1:
        return PLAIN
    levels, offset, row = [], 0, 0
    for depth in range(max_depth):
        frontier = top_k if depth else 1
        next_size = top_k if depth < max_depth - 1 else 0
        levels.append(Level(frontier, offset, row, next_size, None))
        offset += frontier * top_k
        row += next_size
    return TreeShape(num_nodes, max_depth, top_k, tuple(levels), offset)


def _static(choices: tuple[tuple[int, ...], ...]) -> TreeShape:
    paths = sorted(choices, key=lambda path: (len(path), path))
    max_depth = len(paths[-1])
    top_k = max(path[-1] for path in paths) + 1
    parents = {path[:-1] for path in paths}
    levels, offset, row = [], 0, 0
    pool_index: dict[tuple[int, ...], int] = {}
    frontiers = [[()]]
    for depth in range(1, max_depth + 1):
        frontier = frontiers[-1]
        candidate = {path: frontier.index(path[:-1]) * top_k + path[-1] for path in paths if len(path) == depth}
        pool_index |= {path: offset + index for path, index in candidate.items()}
        expanded = [path for path in candidate if path in parents]
        levels.append(Level(len(frontier), offset, row, len(expanded), torch.tensor([candidate[path] for path in expanded], dtype=torch.int32)))
        offset += len(frontier) * top_k
        row += len(expanded)
        frontiers.append(expanded)
    nodes = sorted(pool_index.values())
    node_of = {(): 0} | {path: 1 + nodes.index(index) for path, index in pool_index.items()}
    return TreeShape(
        num_nodes=len(paths) + 1,
        max_depth=max_depth,
        top_k=top_k,
        levels=tuple(levels),
        pool_size=offset,
        node_choices=torch.tensor(nodes, dtype=torch.int32),
        frontier_nodes=tuple(tuple(node_of[path] for path in frontier) for frontier in frontiers[:-1]),
    )
