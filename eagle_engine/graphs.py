"""The target's forward over a tree, recorded once per batch size and replayed: on the CPU it saves the cost of some 300 Python calls per step."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_engine.state import DecodeState
from eagle_engine.target import TargetModel
from eagle_kernels import Recording, Tree, record


class VerifyGraphs:
    """Recordings by batch size and number of threads, each with its own inputs and results.

    They read page_table, seq_lens and the cache of the state they were made for, whose buffers never move.
    """

    def __init__(self, target: TargetModel, state: DecodeState) -> None:
        self._target, self._state = target, state
        self._graphs: dict[tuple[int, int], tuple[Recording, list[Tensor], Tensor, Tensor]] = {}

    @staticmethod
    def can_record(target: TargetModel) -> bool:
        """Mixtures of experts use torch's own operations, which a recording does not see."""
        return target.config.num_experts == 0

    def replay(self, batch: int, tree: Tree) -> tuple[Tensor, Tensor]:
        """As step.forward_tree; the results are overwritten by the next replay."""
        key = (batch, torch.get_num_threads())
        inputs = [tree.tokens, tree.position_ids, tree.packed_ancestor_mask]
        if key not in self._graphs:
            static = [tensor.clone() for tensor in inputs]
            with record() as recording:
                features, logits = forward_tree(self._target, self._state, batch, *static)
            self._graphs[key] = (recording, static, features, logits)
            return features, logits
        recording, static, features, logits = self._graphs[key]
        for destination, source in zip(static, inputs):
            destination.copy_(source)
        recording.replay()
        return features, logits


def forward_tree(target: TargetModel, state: DecodeState, batch: int, tokens: Tensor, position_ids: Tensor, packed_ancestor_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The target's forward over the trees [B, N] of the first `batch` slots: features [B, N, H] and logits [B * N, V]."""
    features = target.forward(tokens, position_ids, state.target_cache, state.seq_lens[:batch], state.page_table[:batch], packed_ancestor_mask)
    return features, target.logits(features.view(-1, features.shape[-1]))
