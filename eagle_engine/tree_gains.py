"""What trees of other sizes would have brought: read off the pool of one step, on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eagle_engine.state import GAIN_UNITS
from eagle_engine.tree_shape import TreeShape
from eagle_kernels import DraftPool


def measure_gains(pool: DraftPool, executed: TreeShape, shapes: Sequence[TreeShape], gains: Tensor) -> None:
    """Put into gains [B, G] int64 how many drafts each shape could expect to have accepted, for the pool [B, P] that a step of the shape `executed` has filled.

    shapes  those with drafts, G of them, with the same top_k. A tree less deep than the executed one would have had the same pool up to its depth; of a deeper one nothing is known: -1

    A draft is accepted with the probability of its path, which the drafter puts at exp(score). So a tree expects the sum of these over its nodes, which are the best of its levels
    (EAGLE-2: Li et al., 2024, section 4; that a drafter's confidence is worth that much is measured by eagle_engine.calibration).
    """
    probabilities = pool.scores.exp().nan_to_num_(nan=0.0)
    gains.fill_(-1)
    for depth in sorted({shape.max_depth for shape in shapes if shape.max_depth <= executed.max_depth}):
        columns = [i for i, shape in enumerate(shapes) if shape.max_depth == depth]
        last = executed.levels[depth - 1]
        best = probabilities[:, : last.pool_offset + last.frontier * executed.top_k].sort(dim=1, descending=True).values.cumsum(dim=1)
        for column in columns:
            gains[:, column] = (best[:, shapes[column].num_nodes - 2] * GAIN_UNITS).long()
