"""What is run again without Python: on CUDA the whole step as a captured graph, on the CPU the target's forward over a tree as a recording."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from eagle_engine.state import DecodeState
from eagle_engine.target import TargetModel
from eagle_kernels import Recording, Tree, record

Tag = TypeVar("Tag")


class GraphApi(Protocol):
    """What the engine asks of a device that works asynchronously. `CudaGraphs` is the real one; tests put one in its place that counts."""

    def warm_up(self, run: Callable[[], None]) -> None: ...

    def capture(self, run: Callable[[], None]) -> object: ...

    def replay(self, graph: object) -> None: ...

    def host_buffer(self, like: Tensor) -> Tensor: ...

    def copy_to_host(self, source: Tensor, destination: Tensor) -> object: ...

    def wait(self, copied: object) -> None: ...


class CudaGraphs:
    """GraphApi of torch.cuda."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # one memory pool for all graphs, since only one runs at a time

    def warm_up(self, run: Callable[[], None]) -> None:
        """Compile what is compiled on first use and let libraries allocate, on another stream, as capturing demands."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy_to_host(self, source: Tensor, destination: Tensor) -> torch.cuda.Event:
        destination.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, copied: torch.cuda.Event) -> None:
        copied.synchronize()


class StepGraphs:
    """The whole step, captured once for each batch bucket (powers of two, and the largest batch) over the first slots of the state.

    A batch between two buckets runs as the larger one: the slots past it are dummies. All buffers are the state's or the graphs' own, so a replay allocates nothing.
    """

    def __init__(self, api: GraphApi, max_batch: int, run: Callable[[int], None], output_ring: Tensor) -> None:
        """run(batch): one step, eagerly, over the first `batch` slots, all of which are dummies now; output_ring: what a step leaves for the host."""
        self.api = api
        self._output_ring = output_ring
        self._host_rings = [api.host_buffer(output_ring) for _ in range(2)]
        self._in_flight: tuple[object, object, Tensor] | None = None
        self.buckets = batch_buckets(max_batch)
        self._graphs = {}
        # The largest first, so that the smaller ones find its memory in the pool.
        for bucket in reversed(self.buckets):
            step = functools.partial(run, bucket)  # not a lambda: it would see the last bucket when a stand-in for graphs calls it later
            api.warm_up(step)
            self._graphs[bucket] = api.capture(step)

    def replay(self, batch: int) -> None:
        """One step over the first `batch` slots and, up to the next bucket, dummies."""
        self.api.replay(self._graphs[next(bucket for bucket in self.buckets if bucket >= batch)])

    def launch(self, batch: int, tag: Tag) -> tuple[Tag, Tensor] | None:
        """Send a step on its way; the tag and the output ring of the step before it, if there was one. So the device never waits for the host, and the host waits for a step that is probably over."""
        self.replay(batch)
        before, ring = self._in_flight, self._host_rings[0]
        if before is not None and before[2] is ring:
            ring = self._host_rings[1]
        self._in_flight = (tag, self.api.copy_to_host(self._output_ring, ring), ring)
        if before is None:
            return None
        self.api.wait(before[1])
        return before[0], before[2]

    def settle(self) -> tuple[Tag, Tensor] | None:
        """Wait for the step that is on its way; its tag and output ring, or None when there is none."""
        before, self._in_flight = self._in_flight, None
        if before is None:
            return None
        self.api.wait(before[1])
        return before[0], before[2]


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, ... below max_batch, and max_batch."""
    return tuple(1 << i for i in range((max_batch - 1).bit_length())) + (max_batch,)


class VerifyGraphs:
    """The target's forward over a tree on the CPU, recorded once per batch size and number of threads and replayed: it saves the cost of some 300 Python calls per step.

    The recordings have their own inputs and results; they read page_table, seq_lens and the cache of the state they were made for, whose buffers never move.
    """

    def __init__(self, target: TargetModel, captured_layers: tuple[int, ...], state: DecodeState) -> None:
        self._target, self._captured_layers, self._state = target, captured_layers, state
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
                states, logits = forward_tree(self._target, self._captured_layers, self._state, batch, *static)
            self._graphs[key] = (recording, static, states, logits)
            return states, logits
        recording, static, states, logits = self._graphs[key]
        for destination, source in zip(static, inputs):
            destination.copy_(source)
        recording.replay()
        return states, logits


def forward_tree(
    target: TargetModel, captured_layers: tuple[int, ...], state: DecodeState, batch: int, tokens: Tensor, position_ids: Tensor, packed_ancestor_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's forward over the trees [B, N] of the first `batch` slots: the states for the drafter [B, N, fused_size] and logits [B * N, V]."""
    features, states = target.forward_with_states(captured_layers, tokens, position_ids, state.target_cache, state.seq_lens[:batch], state.page_table[:batch], packed_ancestor_mask)
    return states, target.logits(features.view(-1, features.shape[-1]))
