"""What a step cannot be faster than on a machine: the bytes that its forwards must read over the bandwidth, the multiply-adds of its rows over the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from eagle_engine.drafter import Drafter
from eagle_engine.machine_rates import Ceilings
from eagle_engine.model_config import ModelConfig
from eagle_engine.target import TargetModel
from eagle_engine.target_weights import packed_shapes
from eagle_engine.tree_shape import TreeShape


class Forward(NamedTuple):
    """One pass over weights.

    num_bytes  weights, keys and values that must be read
    flops      2 * weights * rows: a multiply-add is two; attention and norms are left out
    """

    num_bytes: float
    flops: float

    def seconds(self, rates: Ceilings) -> float:
        return max(self.num_bytes / rates.read_bandwidth, self.flops / rates.fma_rate)


def floor_seconds(forwards: Sequence[Forward], rates: Ceilings) -> float:
    """Of forwards that run one after the other."""
    return sum(forward.seconds(rates) for forward in forwards)


def verify_forwards(target: TargetModel, shape: TreeShape, batch: int, context: float) -> list[Forward]:
    """The target's forward over `batch` trees behind `context` committed rows each, layers and head."""
    weights = target_weights(target.config)
    window = target.config.sliding_window
    seen = min(context, window) if window else context
    cache = batch * seen * target.config.num_layers * _row_bytes(target.config, target)
    return [Forward(weights * target.dtype.itemsize + cache, 2 * weights * batch * shape.num_nodes)]


def draft_forwards(drafter: Drafter, target: TargetModel, shape: TreeShape, batch: int, context: float) -> list[Forward]:
    """The drafter's forwards: over what was committed last (one row of each sequence at least), then level by level, a head after each."""
    config, itemsize = drafter.config, target.dtype.itemsize
    matrices = {name: math.prod(size) for name, size in config.expected_tensors().items() if len(size) == 2 and name != "lm_head.weight"}
    every = sum(matrices.values())
    level_weights = every - (matrices["fc.weight"] if config.version == 3 else 0)  # what EAGLE-3 fuses is the target's states, which deeper levels have none of
    head = drafter.vocab_size * config.layer.hidden_size
    seen = min(context, drafter.window) if drafter.window else context
    cache = batch * seen * _row_bytes(config.layer, target)
    forwards = []
    for number, level in enumerate(shape.levels):
        rows = batch * level.frontier
        weights = level_weights if number else every
        forwards += [Forward(weights * itemsize + cache, 2 * weights * rows), Forward(head * itemsize, 2 * head * rows)]
    return forwards


def target_weights(config: ModelConfig) -> int:
    """Numbers in the matrices that a row is multiplied with: of a mixture's experts those that it goes to."""
    sizes = {kind: math.prod(size) for kind, size in packed_shapes(config).items()}
    mlp = (sizes["gate_up"] + sizes["down"]) * (config.num_experts_per_token if config.num_experts else 1)
    return config.num_layers * (sizes["qkv"] + sizes["o"] + sizes["router"] + mlp) + sizes["head"]


def _row_bytes(config: ModelConfig, target: TargetModel) -> int:
    """Keys and values of one row in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * target.activation_dtype.itemsize
