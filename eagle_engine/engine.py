"""The engine: models, cache and requests."""

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
from eagle_engine.intake import Prompt, check_params, make_answers, read_prompt
from eagle_engine.kv_cache import PagePool, make_kv_cache
from eagle_engine.loading import DEMO, config_of, default_max_model_len, load_models, slack_rows
from eagle_engine.observation import Observer
from eagle_engine.outputs import CompletionOutput, RequestOutput, TextDelta
from eagle_engine.prefill_attention import longest_chunk
from eagle_engine.prefill import draw_first, prefill_piece
from eagle_engine.request import Request
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.scheduler import Scheduler
from eagle_engine.state import DecodeState
from eagle_engine.step import Models, PhaseTimer, catch_up, run_step
from eagle_engine.structured_outputs import Grammars
from eagle_engine.target import TargetModel
from eagle_engine.tokenizer import Tokenizer
from eagle_engine.tree_shape import PLAIN, on_device, tree_shapes
from eagle_engine.tree_sizes import TreeSizes
from eagle_engine.tuning import measure_steps

MAX_BEHIND = 64  # pairs that the drafter may be behind while nothing is drafted; then it takes them all at once, which costs a fraction of a percent of the steps in between


class Engine:
    """EAGLE speculative decoding whose output is that of plain decoding, token for token.

    target, drafter  the models; drafter None: plain decoding
    tokenizer        None: prompts are token ids, and answers have no text
    graph_api        how steps are captured and replayed; None: torch.cuda's graphs on CUDA, none on the CPU
    profile          of an adaptive tree: what steps cost, taken at its word; None: as it was measured before for these models on this machine, or else is measured now, and corrected by what steps take
    progress         show a bar on stderr while it is measured
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        tokenizer: Tokenizer | None,
        config: EagleConfig | None = None,
        *,
        eos_token_ids: tuple[int, ...] | None = None,
        graph_api: GraphApi | None = None,
        profile: CostProfile | None = None,
        progress: bool = False,
    ) -> None:
        config = config or EagleConfig()
        self.config, self.tokenizer = config, tokenizer
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
        self.eos_token_ids = frozenset(eos_token_ids if eos_token_ids is not None else tokenizer.eos_token_ids if tokenizer else target.config.eos_token_ids)
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
        self._grammars = Grammars(tokenizer, target.config.vocab_size, self.eos_token_ids)
        self._pending = 1  # pairs that wait for the drafter, of any running request: at most
        if sizes and profile not in (None, UNMEASURED):
            if not isinstance(profile, CostProfile):
                raise EagleError(f"profile: expected a CostProfile, got {type(profile).__name__}")
            profile.check_shapes(self.shapes)
        self.sizes = TreeSizes(self.shapes, profile or self._profile(progress)) if sizes else None
        self._corrects_profile = self.sizes is not None and profile is None
        self._observer: Observer | None = None
        self._undelivered: list[RequestOutput] = []
        self._next_id = 0

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path = DEMO,
        draft: str | Path | None = "auto",
        *,
        device: str = "auto",
        dtype: str = "auto",
        draft_vocab: int | str | Path | None = "auto",
        draft_layer_ids: str | None = None,
        draft_window: int = 0,
        threads: int | None = None,
        progress: bool = True,
        config: EagleConfig | None = None,
        profile: CostProfile | None = None,
        **options,
    ) -> Engine:
        """Load a target and its drafter.

        target       "demo", a Hugging Face directory or hub id, or a .gguf file
        draft        a drafter directory in a published format of EAGLE-1/2 or EAGLE-3 (speculators' and SGLang's among them), or a hub id; "auto": the demo's drafter with the demo target, else an error that asks for one; "eagle1", "eagle3": those of the demo target;
                     None or "none": plain decoding
        device       "cpu", "cuda", or "auto": CUDA where there is a GPU
        dtype        of the weights: "float32" (CPU), "bfloat16", "float16" (CUDA), or "auto": on the CPU float32 for float32 checkpoints and bfloat16 for all others, GGUF files among them;
                     on CUDA float16 for float16 checkpoints and bfloat16 for all others
        draft_vocab  None: the whole vocabulary, or the drafter's own; a number: so many of the drafter's most frequent tokens; a file of token ids; "auto": 4096 for the demo pair, else None
        draft_layer_ids  "input" or "output": what eagle_aux_hidden_state_layer_ids of an EAGLE-3 drafter count where its config.json does not say: inputs of those layers (vLLM) or outputs (SGLang)
        draft_window  tokens that the drafter's attention reaches back, for texts longer than those it was trained on; 0: all. The text does not depend on it
        threads      of torch and the kernels; None leaves them as they are
        profile      as for the constructor
        options      fields of EagleConfig, instead of `config`

        EagleError says what is wrong with a file or an option.
        """
        config = config_of(config, options)
        if threads is not None:
            torch.set_num_threads(threads)
        return cls(*load_models(target, draft, config, device, dtype, draft_vocab, draft_layer_ids, draft_window, progress), config, profile=profile, progress=progress)

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

    def plain(self) -> Engine:
        """An engine of plain decoding on the same target, weights shared."""
        return Engine(self.models.target, None, self.tokenizer, self.config, eos_token_ids=tuple(self.eos_token_ids), graph_api=self._graphs.api if self._graphs else None)

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

    def generate(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams] | None = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Answers to prompts, in their order.

        prompts          texts, or lists of token ids; one or several
        sampling_params  one for all, or one for each

        A prompt that cannot be served gives an output with finish_reason "error" and its `error`; the others go on.
        """
        if not isinstance(prompts, (str, list, tuple)):
            raise EagleError(f"prompts: expected texts or lists of token ids, one or several, got {type(prompts).__name__}")
        prompts = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        params = sampling_params if isinstance(sampling_params, list) else [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise EagleError(f"sampling_params: expected one, or {len(prompts)} for as many prompts, got {len(params)}")
        for param in params:
            check_params(param)
        requests: list[Request | RequestOutput] = []
        mine: list[Request] = []
        with tqdm(total=sum(param.n for param in params), desc="generating", unit="answer", disable=not progress, leave=False) as bar:
            try:
                for prompt, param in zip(prompts, params):
                    try:
                        requests.append(self._enqueue(prompt, param, held=True))
                        mine += requests[-1].answers
                    except EagleError as error:
                        ids = list(prompt) if isinstance(prompt, (list, tuple)) else []
                        requests.append(RequestOutput(self._next_request_id(), prompt if isinstance(prompt, str) else None, ids, [CompletionOutput(0, "", [], "error", error=str(error))]))
                        bar.total -= param.n
                while not all(request.finished for request in mine):
                    self._advance()
                    bar.update(sum(request.finished for request in mine) - bar.n)
            finally:
                for request in mine:
                    if not request.all_finished:
                        self.abort(request.request_id)
        return [request.output() if isinstance(request, Request) else request for request in requests]

    def chat(self, messages: list[dict[str, str]], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The answer to a conversation [{"role": ..., "content": ...}, ...], through the model's chat template."""
        return self.generate([self.encode_chat(messages)], sampling_params)[0]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for an answer."""
        return self._need_tokenizer().encode_chat(messages)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """The answer in pieces, as each step emits them; joined, their texts are the text of `generate`. Closing the iterator ends the request. EagleError, after the last piece, when
        something went wrong."""
        sampling_params = SamplingParams() if sampling_params is None else sampling_params
        check_params(sampling_params)
        if sampling_params.n > 1:
            raise EagleError(f"n: a stream has one answer, got n {sampling_params.n}; use generate")
        request = self._enqueue(prompt, sampling_params, held=True)
        try:
            while True:
                if not request.finished:  # other calls may have carried it on, to its end even
                    self._advance()
                delta = request.delta()
                if delta.finish_reason == "error":
                    if delta.text or delta.token_ids:
                        yield delta._replace(finish_reason=None, stats=None)
                    raise EagleError(request.error)
                if delta.text or delta.token_ids or delta.finish_reason is not None:
                    yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queue a prompt; its request id. EagleError when it cannot be served."""
        return self._enqueue(prompt, sampling_params, held=False).request_id

    def has_unfinished(self) -> bool:
        return bool(self._undelivered) or not self.scheduler.is_empty

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now, all its answers, and free its pages; its output so far, or None when it is not in the engine."""
        mine = self.scheduler.find(request_id)
        for request in mine:
            request.finish("abort")
            self.scheduler.retire(request)
        return mine[0].output() if mine else None

    def step(self) -> list[RequestOutput]:
        """Admit waiting requests, prefill a piece of those that are new, advance every one that decodes by one draft-and-verify cycle; the outputs of the caller's requests that have ended since the last call."""
        self._advance()
        ended, self._undelivered = self._undelivered, []
        return ended

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

    def _enqueue(self, prompt: Prompt, sampling_params: SamplingParams, held: bool) -> Request:
        """The first of its answers. held: whoever queued the request keeps it and reads its output there, instead of from `step`."""
        check_params(sampling_params)
        text, ids = read_prompt(prompt, self.tokenizer, self.models.target.config.vocab_size)
        limit = min(sampling_params.max_tokens, self._room_for(ids))
        needed = self.pages.pages_for(len(ids) + limit + self._step_rows)
        if needed > self.pages.num_pages:
            raise EagleError(f"the request needs {needed} pages of the KV cache, which has {self.pages.num_pages}; ask for fewer tokens or raise num_pages")
        self._check_steps_can(sampling_params)
        if sampling_params.stop_strings and self.tokenizer is None:
            raise EagleError("stop strings need a tokenizer, and this engine has none")
        answers = make_answers(self._next_request_id(), text, ids, sampling_params, limit, self.tokenizer, self.eos_token_ids, self._grammars, self.models.target, held)
        for answer in answers:
            self.scheduler.add(answer)
        return answers[0]

    def _room_for(self, prompt_ids: list[int]) -> int:
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise EagleError(f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer in max_model_len {self.max_model_len}")
        return room

    def _check_steps_can(self, params: SamplingParams) -> None:
        asked = ", ".join((*params.changes_logits, *params.tells_logprobs))
        if asked and self.models.rejection and self.models.shape.levels:
            raise EagleError(f'{asked}: not with acceptance "rejection"; use "exact"')

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

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise EagleError("this engine has no tokenizer: give prompts as lists of token ids")
        return self.tokenizer

    def _next_request_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _mean_rows(running: list[Request]) -> float:
    return sum(request.num_rows for request in running) / len(running)
