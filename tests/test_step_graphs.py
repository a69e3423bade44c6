"""The captured step, without a GPU: a stand-in for the graph API that counts what is asked of it and runs what was captured, and the step on tensors that only claim to be on CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from eagle_engine import EagleConfig, Engine, SamplingParams
from eagle_engine.graphs import batch_buckets
from eagle_engine.prefill import prefill_piece
from eagle_engine.step import PhaseTimer, run_step
from torch.utils._python_dispatch import TorchDispatchMode
from eagle_engine.drafter import Drafter
from eagle_engine.drafter_format import parse_drafter_config
from eagle_engine.target import TargetModel
from tiny_engines import TREES, begin_requests, bigram_drafter, drafter_config, eagle3_config, make_engine, oracle_drafter, plain_tokens, random_drafter, rows_weights, tiny_target
from tiny_targets import CASES, random_tokens


class CountingGraphs:
    """GraphApi on the CPU: a replay runs the captured function. A copy to the host shows its result only once it has been waited for, as a real one may."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._under_way: list[torch.Tensor] = []  # where copies that nobody has waited for go

    def warm_up(self, run: Callable[[], None]) -> None:
        self.events.append("warm_up")
        run()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.events.append("capture")
        run()  # a real capture runs nothing on the device, but allocates; running once more must do no harm
        return run

    def replay(self, graph: Callable[[], None]) -> None:
        self.events.append("replay")
        graph()

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, -(10**12))

    def copy_to_host(self, source: torch.Tensor, destination: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.events.append("copy")
        assert all(destination is not other for other in self._under_way), "a copy into a buffer that another copy still writes"
        self._under_way.append(destination)
        destination.fill_(-(10**12))
        return source.clone(), destination

    def wait(self, copied: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.events.append("wait")
        self._under_way = [other for other in self._under_way if other is not copied[1]]
        copied[1].copy_(copied[0])


def graphed(target, drafter, **options) -> tuple[Engine, CountingGraphs]:
    api = CountingGraphs()
    config = EagleConfig(**(dict(tree="dynamic", max_model_len=160, page_size=8, max_batch_size=4) | options))
    return Engine(target, drafter, None, config, eos_token_ids=(), graph_api=api), api


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_captured_steps_emit_the_tokens_of_plain_decoding(case: str, tree: str) -> None:
    target = tiny_target(case)
    params = [SamplingParams(temperature=0.0, max_tokens=23), SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=17), SamplingParams(temperature=0.0, max_tokens=1)]
    prompts = [random_tokens(seed, length) for seed, length in ((1, 11), (2, 5), (3, 30))]
    expected = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, params)]
    drafter = bigram_drafter(target, [prompt + tokens for prompt, tokens in zip(prompts, expected)])
    engine, _ = graphed(target, drafter, **TREES[tree])
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert outputs[0].stats.acceptance_length > 1.5


def test_one_launch_and_one_copy_per_step_and_the_host_reads_one_step_late() -> None:
    target = tiny_target("llama")
    prompt = random_tokens(1, 9)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    answer = plain_tokens(target, prompt, params)
    engine, api = graphed(target, oracle_drafter(target, prompt + answer), **TREES["chain"])
    assert api.events.count("capture") == api.events.count("warm_up") == len(batch_buckets(4))
    api.events.clear()
    output = engine.generate([prompt], params)[0]
    assert output.token_ids == answer
    # The step after the last one was on its way already when the host learnt that the answer had ended.
    steps = output.stats.steps + 1
    assert api.events == ["replay", "copy"] + ["replay", "copy", "wait"] * (steps - 1)


def test_a_replay_advances_every_running_sequence() -> None:
    """Three sequences run in the bucket of four: as many replays as for one."""
    target = tiny_target("llama")
    engine, api = graphed(target, None)
    api.events.clear()
    outputs = engine.generate([random_tokens(seed, 6) for seed in range(3)], SamplingParams(temperature=0.0, max_tokens=10))
    assert [len(output.token_ids) for output in outputs] == [10] * 3
    assert api.events.count("replay") == 9 + 1  # the first tokens are the prefill's; the last replay was under way


def test_plain_decoding_is_captured_too() -> None:
    target = tiny_target("llama")
    prompt = random_tokens(1, 9)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    engine, api = graphed(target, random_drafter(target), **TREES["dynamic"])
    plain = engine.plain()
    assert plain.generate([prompt], params)[0].token_ids == plain_tokens(target, prompt, params) == engine.generate([prompt], params)[0].token_ids
    assert api.events.count("capture") == 2 * len(batch_buckets(4))


def test_prefill_runs_once_short_and_once_long_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its kernels are compiled then; what it leaves behind is cleared."""
    lengths = []

    def noted(models, state, page_table, token_ids, start, stop):
        lengths.append(stop - start)
        return prefill_piece(models, state, page_table, token_ids, start, stop)

    monkeypatch.setattr("eagle_engine.engine_core.prefill_piece", noted)
    target = tiny_target("llama")
    engine, _ = graphed(target, random_drafter(target), prefill_chunk=64, **TREES["dynamic"])
    assert sorted(lengths) == [1, 64]
    assert engine.state.seq_lens.tolist() == [1] * 4 and not engine.state.active.any()
    assert sorted(graphed(target, None, prefill_chunk=256)[0]._graphs.buckets) == [1, 2, 4] and max(lengths) == 159  # max_model_len less the token it draws


@pytest.mark.parametrize("max_batch, expected", [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (9, (1, 2, 4, 8, 9))])
def test_batch_buckets(max_batch: int, expected: tuple[int, ...]) -> None:
    assert batch_buckets(max_batch) == expected


def test_requests_come_and_go_between_steps() -> None:
    """More requests than slots, answers that end by stop tokens at different times: slots are refilled, moved and padded, and nobody reads another's tokens."""
    target = tiny_target("llama")
    prompts = [random_tokens(seed, 3 + 5 * seed % 17) for seed in range(9)]
    free = [SamplingParams(temperature=0.8, seed=seed, max_tokens=30) for seed in range(9)]
    texts = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, free)]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=30, stop_token_ids=[texts[seed][3 * seed]] if seed % 2 else []) for seed in range(9)]
    expected = [make_engine(target, None).generate([prompt], param)[0] for prompt, param in zip(prompts, params)]
    drafter = bigram_drafter(target, [prompt + text for prompt, text in zip(prompts, texts)])
    engine, _ = graphed(target, drafter, max_batch_size=3, **TREES["dynamic"])
    outputs = engine.generate(prompts, params)
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [(output.token_ids, output.finish_reason) for output in expected]
    assert engine.pages.num_free == engine.pages.num_pages


def test_a_stop_token_ends_the_sequence_on_the_device() -> None:
    target = tiny_target("llama")
    prompt = random_tokens(1, 9)
    answer = plain_tokens(target, prompt, SamplingParams(temperature=0.0, max_tokens=20))
    stop = next(token for i, token in enumerate(answer) if i >= 6 and token not in answer[:i])
    engine, _ = graphed(target, oracle_drafter(target, prompt + answer), **TREES["chain"])
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop]))
    ended = []
    while not ended:
        ended = engine.step()
    assert ended[0].token_ids == answer[: answer.index(stop) + 1] and ended[0].finish_reason == "stop"
    # Without the device's own stop the step that was thrown away would have counted on.
    assert int(engine.state.output_ring[0, -1]) == len(ended[0].token_ids)


@pytest.mark.parametrize("length", [1, 9])
def test_the_step_behind_a_stop_token_does_the_same_again(length: int) -> None:
    """It was sent off before the host had read of the end: lengths and pending pairs stay as they are, so that it reaches before no sequence of one token and rewrites the rows that others may find with
    what they hold."""
    target, prompt = tiny_target("llama"), random_tokens(1, length)
    answer = plain_tokens(target, prompt, SamplingParams(temperature=0.0, max_tokens=20))
    stop = next(i for i, token in enumerate(answer) if i >= 2 and token not in answer[:i])
    engine, _ = graphed(target, oracle_drafter(target, prompt + answer, drafter=random_drafter(target)), **TREES["chain"])
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[answer[stop]]))
    with torch.inference_mode():
        begin_requests(engine)
        engine._graphs.replay(1)
        while engine.state.active[0]:
            engine._graphs.replay(1)
        state, names = engine.state, ("seq_lens", "root_tokens", "num_pending", "pending_tokens", "pending_features", "output_ring", "draft_cache", "target_cache")
        rows = int(state.seq_lens[0])
        pages = state.page_table[0].long()
        assert rows >= int(state.num_pending[0])

        def seen(name: str) -> torch.Tensor:
            value = getattr(state, name)
            return value[:, :, pages].flatten(2, 3)[:, :, : rows - ("draft" in name)].clone() if "cache" in name else value[0].clone()

        before = {name: seen(name) for name in names}
        engine._graphs.replay(1)
        for name in names:
            assert torch.equal(seen(name), before[name]), name


def test_dummy_slots_write_to_the_last_page_alone() -> None:
    """Three sequences in the bucket of four, again with slots that others have left: pages that nobody took are as they were, and those that were taken give the tokens of plain decoding."""
    target = tiny_target("llama")
    engine, _ = graphed(target, random_drafter(target), num_pages=24, **TREES["dynamic"])
    params = SamplingParams(temperature=0.0, max_tokens=8)
    for seeds in ((1, 2, 3), (4, 5, 6, 7), (8, 9, 10)):
        prompts = [random_tokens(seed, 5) for seed in seeds]
        ids = [engine.add_request(prompt, params) for prompt in prompts]
        with torch.inference_mode():
            begin_requests(engine)
        free = list(engine.pages._free)  # those that nobody has ever taken or that are not worth keeping
        assert len(engine.scheduler.running) == len(seeds) and len(free) > 0
        for cache in (engine.state.target_cache, engine.state.draft_cache):
            cache[:, :, free] = 7.25
        outputs = {}
        while engine.has_unfinished():
            outputs |= {output.request_id: output.token_ids for output in engine.step()}
        assert [outputs[request_id] for request_id in ids] == [plain_tokens(target, prompt, params) for prompt in prompts]
        for cache in (engine.state.target_cache, engine.state.draft_cache):
            assert (cache[:, :, free] == 7.25).all()


def test_no_buffer_of_a_captured_step_ever_moves() -> None:
    """A graph keeps addresses: requests come, go and move, and every tensor of the state stays where it was."""
    target = tiny_target("llama")
    engine, _ = graphed(target, random_drafter(target), max_batch_size=2, **TREES["dynamic"])
    before = {field.name: getattr(engine.state, field.name).data_ptr() for field in fields(engine.state)}
    engine.generate([random_tokens(seed, 5 + seed) for seed in range(5)], SamplingParams(temperature=0.0, max_tokens=7))
    assert {field.name: getattr(engine.state, field.name).data_ptr() for field in fields(engine.state)} == before


class LaunchCounter(TorchDispatchMode):
    """Names of the operations that compute: not allocations, and not those whose result is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        storages = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        first = result[0] if isinstance(result, (list, tuple)) and result else result
        is_view = isinstance(first, torch.Tensor) and not func._schema.is_mutable and first.untyped_storage()._cdata in storages
        if not is_view and "empty" not in name:
            self.launches[f"{func.namespace}.{name}"] += 1
        return result


def engine_without_data(tree: dict, draft_vocab: int | None = None, drafter: dict | None = None, **options) -> Engine:
    """An engine as it is on CUDA, weights as rows and activations in bf16, whose tensors hold no data: their device is "meta"."""
    # Matrices are bf16 there, norms and biases fp32 as they are loaded.
    weights = {name: torch.empty(tensor.shape, dtype=torch.bfloat16 if tensor.dim() == 2 else torch.float32, device="meta") for name, tensor in WEIGHTS.items()}
    target = TargetModel(CONFIG, weights, 512, deterministic=options.pop("deterministic", False))
    drafter_of, drafter = drafter or DRAFTER_CONFIG, None
    if tree is not None:
        drafter_config = parse_drafter_config(drafter_of)
        tensors = {name: torch.empty(shape, dtype={"d2t": torch.int64, "t2d": torch.bool}.get(name)) for name, shape in drafter_config.expected_tensors().items()}
        drafter = Drafter(drafter_config, tensors, target, max_positions=512, draft_vocab=None if draft_vocab is None else torch.arange(draft_vocab))
    return Engine(target, drafter, None, EagleConfig(max_model_len=160, page_size=8, enforce_eager=True, **(dict(tree="dynamic") | (tree or {})), **options), eos_token_ids=())


CONFIG = tiny_target("llama").config
WEIGHTS = rows_weights(tiny_target("llama"))
DRAFTER_CONFIG = drafter_config(tiny_target("llama"))

# Launches of one step besides those of the target's and the drafter's own layers:
# rerank, sample, accept, compact, advance; three operations of positions and lengths, one that takes the last feature, and one of the sampled positions.
GLUE_BUDGET = 10


# Three states of the target of two layers are all that it has.
EAGLE3_CONFIG = eagle3_config(tiny_target("llama"), eagle_aux_hidden_state_layer_ids=[0, 1, 2], eagle_aux_hidden_state_layer_id_convention="input")
DRAFTERS = {"eagle-1": DRAFTER_CONFIG, "eagle-3": EAGLE3_CONFIG, "eagle-3.1": EAGLE3_CONFIG | dict(fc_norm=True, norm_output=True)}
# Of one draft forward. EAGLE-1: embedding, concatenation, fc, qkv, rope, attention, o, norm, gate_up, silu, down, addition; EAGLE-3: two norms in place of fc.
FORWARD_LAUNCHES = {"eagle-1": 12, "eagle-3": 13, "eagle-3.1": 14}  # 3.1: the final norm is part of the layer
HEAD_LAUNCHES = {"eagle-1": 0, "eagle-3": 1, "eagle-3.1": 0}  # the final norm, before each head
FUSE_LAUNCHES = {"eagle-1": 0, "eagle-3": 1, "eagle-3.1": 1 + 3 + 3 + 1}  # fc; before it three norms of three copies, and their concatenation


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("tree", ["plain", *TREES])
def test_a_step_never_asks_the_host_and_keeps_its_launch_budget(tree: str, kind: str, deterministic: bool) -> None:
    """Tensors without data know dtypes, shapes and their device: reading a value, a tensor left on the CPU, or a result whose shape hangs on data raises."""
    engine = engine_without_data(None if tree == "plain" else TREES[tree], drafter=DRAFTERS[kind], deterministic=deterministic)
    shape, layers = engine.models.shape, engine.models.target.config.num_layers
    with torch.inference_mode(), LaunchCounter() as counter:
        run_step(engine.models, engine.state, 2, PhaseTimer())
    launches = counter.launches
    # Per layer: two norms, qkv, rope, attention, o, gate_up, silu, down; then embedding, final norm, head.
    target_launches = 9 * layers + 3 + launches["eagle_kernels.copy_rows"]
    assert launches["eagle_kernels.copy_rows"] == (0 if kind == "eagle-1" or tree == "plain" else 3)
    forwards = 1 + sum(level.next_size > 0 for level in shape.levels) if shape.levels else 0
    # head_topk and expand_topk for each level.
    draft_launches = FORWARD_LAUNCHES[kind] * forwards + (2 + HEAD_LAUNCHES[kind]) * len(shape.levels) + FUSE_LAUNCHES[kind] * bool(forwards)
    total = sum(launches.values())
    assert total - target_launches - draft_launches <= GLUE_BUDGET, dict(launches)
    assert launches["eagle_kernels.rerank"] == launches["eagle_kernels.sample"] == launches["eagle_kernels.accept"] == 1
    assert launches["eagle_kernels.compact"] == (1 if shape.levels else 0)
    assert launches["eagle_kernels.expand_topk"] == launches["eagle_kernels.head_topk"] == len(shape.levels)


@pytest.mark.parametrize("kind, draft_vocab", [("eagle-1", None), ("eagle-1", 40), ("eagle-3", None)], ids=["whole-vocabulary", "draft-vocabulary", "eagle-3"])
@pytest.mark.parametrize("tree", ["static", "chain"])
def test_a_step_of_rejection_sampling_never_asks_the_host(tree: str, kind: str, draft_vocab: int | None) -> None:
    engine = engine_without_data(TREES[tree], acceptance="rejection", draft_vocab=draft_vocab, drafter=DRAFTERS[kind])
    with torch.inference_mode(), LaunchCounter() as counter:
        run_step(engine.models, engine.state, 2, PhaseTimer())
    assert counter.launches["eagle_kernels.accept_rejection"] == 1
    assert counter.launches["eagle_kernels.draw_children"] == len(engine.models.shape.levels)


def test_a_draft_vocabulary_is_mapped_on_the_device() -> None:
    engine = engine_without_data(TREES["dynamic"], draft_vocab=40)
    assert engine.models.drafter.draft_to_target.device.type == "meta"
    with torch.inference_mode():
        run_step(engine.models, engine.state, 2, PhaseTimer())


def test_a_step_that_asks_the_host_or_mixes_devices_is_found() -> None:
    engine = engine_without_data(TREES["dynamic"])
    with torch.inference_mode(), pytest.raises((RuntimeError, NotImplementedError), match="item|data|meta"):
        int(engine.state.seq_lens[0])
    engine.state.seq_lens = torch.zeros(8, dtype=torch.int32)
    with torch.inference_mode(), pytest.raises((ValueError, RuntimeError), match="device|cpu"):
        run_step(engine.models, engine.state, 2, PhaseTimer())
