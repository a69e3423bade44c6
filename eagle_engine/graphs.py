"""What is run again without Python: on CUDA the whole step as a captured graph, on the CPU the target's forward over a tree as a recording."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from eagle_engine.state import DecodeState
from eagle_engine.target import TargetModel
from eagle_kernels import Recording, Tree, record

Tag = TypeVar("Tag")
MAX_RECORDED = 128  # sizes of the verify forward that are kept: an adaptive tree has some fifteen for each number of running requests


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
    """The whole step, captured once for each shape of tree and each batch bucket (powers of two, and the largest batch) over the first slots of the state.

    A batch between two buckets runs as the larger one: the slots past it are dummies. All buffers are the state's or the graphs' own, so a replay allocates nothing.
    """

    def __init__(self, api: GraphApi, max_batch: int, run: Callable[[int, int], None], outputs: Tensor, num_shapes: int = 1) -> None:
        """run(batch, shape): one step, eagerly, over the first `batch` slots, all of which are dummies now; outputs: what a step leaves for the host."""
        self.api = api
        self._outputs = outputs
        self._host_outputs = [api.host_buffer(outputs) for _ in range(2)]
        self._in_flight: tuple[object, object, Tensor] | None = None
        self.buckets = batch_buckets(max_batch)
        self._graphs = {}
        # The largest first, so that the smaller ones find its memory in the pool.
        for bucket in reversed(self.buckets):
            for shape in reversed(range(num_shapes)):
                step = functools.partial(run, bucket, shape)  # not a lambda: it would see the last bucket when a stand-in for graphs calls it later
                api.warm_up(step)
                self._graphs[bucket, shape] = api.capture(step)

    def replay(self, batch: int, shape: int = 0) -> None:
        """One step over the first `batch` slots and, up to the next bucket, dummies."""
        self.api.replay(self._graphs[next(bucket for bucket in self.buckets if bucket >= batch), shape])

    def replay_and_wait(self, batch: int, shape: int = 0) -> None:
        self.replay(batch, shape)
        self.api.wait(self.api.copy_to_host(self._outputs, self._host_outputs[0]))

    def launch(self, batch: int, tag: Tag, shape: int = 0) -> tuple[Tag, Tensor] | None:
        """Send a step on its way; the tag and the outputs of the step before it, if there was one. So the device never waits for the host, and the host waits for a step that is probably over."""
        self.replay(batch, shape)
        before, outputs = self._in_flight, self._host_outputs[0]
        if before is not None and before[2] is outputs:
            outputs = self._host_outputs[1]
        self._in_flight = (tag, self.api.copy_to_host(self._outputs, outputs), outputs)
        if before is None:
            return None
        self.api.wait(before[1])
        return before[0], before[2]

    def settle(self) -> tuple[Tag, Tensor] | None:
        """Wait for the step that is on its way; its tag and outputs, or None when there is none."""
        before, self._in_flight = self._in_flight, None
        if before is None:
            return None
        self.api.wait(before[1])
        return before[0], before[2]


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, ... below max_batch, and max_batch."""
    return tuple(1 << i for i in range((max_batch - 1).bit_length())) + (max_batch,)


class _RecordedVerify(NamedTuple):
    recording: Recording
    inputs: list[Tensor]
    states: Tensor
    logits: Tensor


class VerifyGraphs:
    """The target's forward over a tree on the CPU, recorded once per size and number of threads and replayed: it saves the cost of some 300 Python calls per step.

    The recordings have their own inputs and states; logits go to one buffer for all. They read page_table, seq_lens and the cache of the state they were made for, whose buffers never move.
    """

    def __init__(self, target: TargetModel, captured_layers: tuple[int, ...], state: DecodeState) -> None:
        self._target, self._captured_layers, self._state = target, captured_layers, state
        self._logits = torch.empty(state.temperature.numel(), target.head.out_features)
        self._recorded: OrderedDict[tuple[int, int, int], _RecordedVerify] = OrderedDict()  # by batch, nodes and threads; the one used last at the end
        self.num_recorded = 0

    @staticmethod
    def can_record(target: TargetModel) -> bool:
        """Mixtures of experts use torch's own operations, which a recording does not see."""
        return target.config.num_experts == 0

    def replay(self, batch: int, tree: Tree) -> tuple[Tensor, Tensor]:
        """As step.forward_tree; the results are overwritten by the next replay."""
        key = (*tree.tokens.shape, torch.get_num_threads())
        given = [tree.tokens, tree.position_ids, tree.packed_ancestor_mask]
        recorded = self._recorded.get(key)
        if recorded is None:
            self.num_recorded += 1
            inputs = [tensor.clone() for tensor in given]
            with record() as recording:
                states, logits = forward_tree(self._target, self._captured_layers, self._state, batch, *inputs, out=self._logits[: tree.tokens.numel()])
            self._recorded[key] = _RecordedVerify(recording, inputs, states, logits)
            if len(self._recorded) > MAX_RECORDED:
                self._recorded.popitem(last=False)
            return states, logits
        self._recorded.move_to_end(key)
        for destination, source in zip(recorded.inputs, given):
            destination.copy_(source)
        recorded.recording.replay()
        return recorded.states, recorded.logits


def forward_tree(
    target: TargetModel, captured_layers: tuple[int, ...], state: DecodeState, batch: int, tokens: Tensor, position_ids: Tensor, packed_ancestor_mask: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The target's forward over the trees [B, N] of the first `batch` slots: the states for the drafter [B, N, fused_size] and logits [B * N, V], put into `out` where it is given."""
    features, states = target.forward_with_states(captured_layers, tokens, position_ids, state.target_cache, state.seq_lens[:batch], state.page_table[:batch], packed_ancestor_mask)
    return states, target.logits(features.view(-1, features.shape[-1]), out)
