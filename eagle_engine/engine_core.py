"""The steps of an engine: models, cache, the tree of each step, and what steps emit handed to their requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from eagle_engine.config import EagleConfig
from eagle_engine.cost_profile import LONG, UNMEASURED, CostProfile, load_profile, profile_file, save_profile
from eagle_engine.cuda_limits import check_device, check_limits
from eagle_engine.drafter import Drafter
from eagle_engine.errors import EagleError
from eagle_engine.graphs import CudaGraphs, GraphApi, StepGraphs, VerifyGraphs, batch_buckets
from eagle_engine.kv_cache import PagePool, make_kv_cache
from eagle_engine.loading import default_max_model_len, slack_rows
from eagle_engine.observation import Observer
from eagle_engine.outputs import RequestOutput
from eagle_engine.prefill import draw_first, prefill_piece
from eagle_engine.prefill_attention import longest_chunk
from eagle_engine.request import Request
from eagle_engine.scheduler import Scheduler
from eagle_engine.state import DecodeState
from eagle_engine.step import Models, PhaseTimer, catch_up, run_step
from eagle_engine.target import TargetModel
from eagle_engine.tree_shape import PLAIN, on_device, tree_shapes
from eagle_engine.tree_sizes import TreeSizes
from eagle_engine.tuning import measure_steps

MAX_BEHIND = 64  # pairs that the drafter may be behind while nothing is drafted; then it takes them all at once, which costs a fraction of a percent of the steps in between


class EngineCore:
    """What runs the steps; Engine, which builds on it, takes prompts and gives texts. Arguments as there.

    models, state, pages, scheduler  what a step runs, what it runs on, and for whom
    shapes                           trees that a step may have, the largest last; of an adaptive tree, plain decoding first
    sizes                            chooses among them; None: there is one
    timer                            seconds by phase
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        config: EagleConfig,
        *,
        graph_api: GraphApi | None,
        profile: CostProfile | None,
        progress: bool,
    ) -> None:
        self.config = config
        device = target.device
        self.shapes = tuple(on_device(shape, device) for shape in tree_shapes(config)) if drafter is not None else (PLAIN,)
        shape = self.shapes[-1]  # the largest, for which there is room
        sizes = self.shapes[1:]
        if drafter is not None and shape.top_k > drafter.vocab_size:
            raise EagleError(f"top_k {shape.top_k} is more than the drafter's vocabulary of {drafter.vocab_size}")
        if device.type == "cuda":
            check_device(device)
            head_dims = {"target": target.config.head_dim} | ({"drafter": drafter.config.layer.head_dim} if drafter is not None else {})
            check_limits(config, head_dims, drafter.vocab_size if drafter is not None else 0)
        self.models = Models(target, drafter if shape.levels else None, shape, config.acceptance == "rejection", config.filter_order, sizes=sizes)
        if graph_api is None and device.type == "cuda" and not config.enforce_eager:
            graph_api = CudaGraphs()
        self.max_model_len = config.max_model_len or default_max_model_len(target.config.max_position_embeddings)
        # Rows of a tree stand above the committed ones, so the longest sequence needs room beyond max_model_len.
        slack = slack_rows(config, drafter is not None, graph_api is not None)
        if target.max_positions < self.max_model_len + slack:
            raise EagleError(f"max_model_len {self.max_model_len} needs {self.max_model_len + slack} positions, the target was loaded with {target.max_positions}")
        self._step_rows = slack
        # A row of the page table starts at a multiple of 16 bytes, which is what kernels are compiled for.
        max_missed = MAX_BEHIND + shape.max_depth + 1 if sizes else 0
        max_pages = (-(-(self.max_model_len + slack + max_missed) // config.page_size) + 3) // 4 * 4
        self.pages = PagePool(config.num_pages or config.max_batch_size * max_pages, config.page_size, lookahead=1 if shape.levels else 0)
        t = target.config
        cache = make_kv_cache(t.num_layers, self.pages.num_pages, config.page_size, t.num_kv_heads, t.head_dim, target.activation_dtype, device)
        draft_cache, fused_size = None, t.hidden_size
        if shape.levels:
            d, fused_size = drafter.config.layer, drafter.config.fused_size
            draft_cache = make_kv_cache(1, self.pages.num_pages, config.page_size, d.num_kv_heads, d.head_dim, target.activation_dtype, device)
        self.state = DecodeState.allocate(config.max_batch_size, max_pages, fused_size, self.shapes, cache, draft_cache, target.activation_dtype, max_missed)
        self.timer = PhaseTimer()
        chunk = longest_chunk(device, target.deterministic, config.prefill_chunk)
        self.scheduler = Scheduler(self.models, self.state, self.pages, config, slack, chunk, self.timer)
        self._graphs: StepGraphs | None = None
        if graph_api is not None:
            with torch.inference_mode():
                self._graphs = StepGraphs(graph_api, config.max_batch_size, self._run_dummies, self.state.outputs, len(self.shapes))
                # The kernels of a prefill are compiled now, not while the first requests wait.
                for length in {1, min(chunk, self.max_model_len - 1)} - {0}:
                    row = prefill_piece(self.models, self.state, self.state.page_table[:1], torch.zeros(length, dtype=torch.int64, device=device), 0, length)
                    draw_first(self.models, self.state, 0, row, length)
                for slot in range(config.max_batch_size):
                    self.state.clear(slot)
        elif not config.enforce_eager and device.type == "cpu" and VerifyGraphs.can_record(target):
            self.models = self.models._replace(graphs=VerifyGraphs(target, self.models.captured_layers, self.state))
        self._pending = 1  # pairs that wait for the drafter, of any running request: at most
        if sizes and profile not in (None, UNMEASURED):
            if not isinstance(profile, CostProfile):
                raise EagleError(f"profile: expected a CostProfile, got {type(profile).__name__}")
            profile.check_shapes(self.shapes)
        self.sizes = TreeSizes(self.shapes, profile or self._profile(progress)) if sizes else None
        self._corrects_profile = self.sizes is not None and profile is None
        self._observer: Observer | None = None
        self._undelivered: list[RequestOutput] = []

    @property
    def memory_bytes(self) -> dict[str, int]:
        """What the engine has allocated for good, by purpose: weights of the target and (its own alone) of the drafter, KV cache, and the buffers of a step. Activations come on top: they belong to
        the captured graphs on CUDA, to the recordings of the verify forward on the CPU, with logits for the largest batch of the largest trees."""
        caches = [cache for cache in (self.state.target_cache, self.state.draft_cache) if cache is not None]
        buffers = [getattr(self.state, field.name) for field in fields(self.state) if field.name not in ("output_ring", "gains")]  # views of outputs
        drafter = self.models.drafter
        return {
            "target": self.models.target.num_bytes,
            "drafter": 0 if drafter is None else drafter.num_bytes,
            "kv_cache": sum(cache.nbytes for cache in caches),
            "state": sum(tensor.nbytes for tensor in buffers if isinstance(tensor, Tensor)) - sum(cache.nbytes for cache in caches),
        }

    @property
    def captures_steps(self) -> bool:
        """Whether steps are replayed from captured graphs (CUDA without enforce_eager)."""
        return self._graphs is not None

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Inside the block, observer(request_ids, trees) is called after every step with an `ObservedTree` of each running request.

        EagleError where steps are captured (CUDA without enforce_eager): nobody can look into a graph that is replayed.
        """
        if self.captures_steps:
            raise EagleError("an observer needs steps that run from Python: set enforce_eager (--enforce-eager)")
        before, self._observer = self._observer, observer
        try:
            yield
        finally:
            self._observer = before

    @torch.inference_mode()
    def _advance(self) -> None:
        scheduler = self.scheduler
        started = scheduler.prefill()
        # A request with a processor has to know its last token before the next is drawn, and the host has a part in drawing it: such steps run from Python, on CUDA too.
        eager = self._graphs is None or any(request.processor is not None for request in scheduler.running)
        if eager:
            self._settle()
            if started:
                self._deliver(list(scheduler.running), None, self.state.outputs)  # an answer may end with its first token
        scheduler.make_room(self._settle)
        running = list(scheduler.running)
        if not running:
            return
        pending = self._pending
        shape = self._choose_shape(running)
        if eager:
            observe = None if self._observer is None else partial(self._observer, [request.request_id for request in running])
            looks = self.sizes is None or self.sizes.wants_gains
            models = self._models_of(shape, looks)._replace(max_pending=pending)
            processors, num_recorded, start = [request.updated_processor() for request in running], self._num_recorded, time.perf_counter()
            run_step(models, self.state, len(running), self.timer, observe, processors)
            if self._corrects_profile and observe is None and self._num_recorded == num_recorded:  # recording a forward takes longer than the forward
                self.sizes.took(shape, len(running), _mean_rows(running), time.perf_counter() - start)
            self._deliver(running, shape, self.state.outputs, looks)
        else:
            # What is read is the step before: the one that runs while a sequence turns out to have ended is thrown away.
            self.timer.start()
            before = self._graphs.launch(len(running), (running, shape), shape)
            self.timer.lap("graph")
            if before is not None:
                self._deliver(*before[0], before[1])

    @property
    def _num_recorded(self) -> int:
        return self.models.graphs.num_recorded if self.models.graphs is not None else 0

    def _models_of(self, shape: int, measures_gains: bool = True) -> Models:
        return self.models._replace(shape=self.shapes[shape], sizes=self.models.sizes if measures_gains else ())

    def _choose_shape(self, running: list[Request]) -> int:
        """Index of the tree of this step; the drafter is brought up to what the tree needs."""
        shape = 0
        if self.sizes is not None:
            shape = self.sizes.choose([request.gains for request in running], _mean_rows(running))
        drafts = bool(self.shapes[shape].levels)
        missed = max(request.num_missed for request in running)
        if missed > 0 and (drafts or missed + self._pending > MAX_BEHIND):
            self.timer.start()
            catch_up(self.models, self.state, len(running), missed)
            self.timer.lap("draft")
            for request in running:
                request.draft_rows, request.num_missed = max(request.num_rows - self._pending, 0), 0
        if drafts:
            for request in running:
                request.draft_rows = request.num_rows  # the draft of this step feeds the drafter what was committed before it
        elif self.sizes is not None:
            for request in running:
                request.num_missed += self._pending
        self._pending = self.shapes[shape].max_depth + 1
        return shape

    def _settle(self) -> None:
        """Deliver what a captured step that is still on its way has emitted."""
        before = self._graphs.settle() if self._graphs is not None else None
        if before is not None:
            self._deliver(*before[0], before[1])

    def _deliver(self, running: list[Request], shape: int | None, outputs: Tensor, looked: bool = True) -> None:
        """Hand each request, by slot, the tokens that it has not seen; retire those that have ended. shape: of the step; None: there was none, these are first tokens. looked: it has measured gains."""
        for request, ring, gains in zip(running, *self.state.read_outputs(outputs, len(running), looked)):
            if request.finished or not request.pages:
                continue  # it ended, or was preempted, while the step was on its way
            accepted = request.receive(ring)
            if gains and shape is not None and accepted is not None:
                request.gains = self.sizes.observe(shape, request.gains, gains, accepted)
            if request.finished:
                self.scheduler.retire(request)
                if request.all_finished and not request.held:
                    self._undelivered.append(request.output())

    def tune(self, progress: Callable[[str], None] = lambda _: None) -> CostProfile:
        """Measure what a step costs for each tree that this engine may grow, and keep it for the next engine of these models on this machine. EagleError unless the tree is adaptive and nothing is running."""
        if len(self.shapes) == 1:
            raise EagleError('nothing to tune: the tree has one size; use tree "adaptive" (--tree adaptive) and 2 nodes or more (--num-nodes)')
        if not self.scheduler.is_empty:
            raise EagleError("the engine cannot be tuned while it answers requests")
        self._settle()
        profile = measure_steps(self.state, self.pages, self.shapes, self._step_rows, self._profiled_rows, self._run_dummies_and_wait, progress)
        save_profile(self.profile_file, profile)
        self.sizes = TreeSizes(self.shapes, profile)
        return profile

    @property
    def profile_file(self) -> Path:
        """Where what `tune` measures is kept."""
        return profile_file(self.models, self.shapes, self.config.max_batch_size, self._profiled_rows, self.captures_steps)

    @property
    def _profiled_rows(self) -> int:
        """The longest context that is measured."""
        return min(LONG, self.max_model_len)

    def _profile(self, progress: bool) -> CostProfile:
        """As it was measured before, or now."""
        known = load_profile(self.profile_file)
        if known is not None:
            return known
        with tqdm(total=len(batch_buckets(self.config.max_batch_size)) + 1, desc="measuring what trees cost here, once", disable=not progress, leave=False) as bar:
            return self.tune(lambda _: bar.update())

    def _run_dummies_and_wait(self, batch: int, shape: int) -> None:
        if self._graphs is None:
            self._run_dummies(batch, shape, self.shapes[shape].max_depth + 1)  # as after another step of this shape
        else:
            self._graphs.replay_and_wait(batch, shape)

    def _run_dummies(self, batch: int, shape: int, max_pending: int | None = None) -> None:
        run_step(self._models_of(shape)._replace(max_pending=max_pending), self.state, batch, PhaseTimer())


def _mean_rows(running: list[Request]) -> float:
    return sum(request.num_rows for request in running) / len(running)
