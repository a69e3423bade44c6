"""The captured step on a GPU: replays against eager steps over trees and lengths, a thousand replays, launches and copies per step. The same tests on the CPU, with a stand-in for graphs, keep this
file from rotting."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from eagle_engine import EagleConfig, EagleError, Engine, SamplingParams
from eagle_engine.step import PhaseTimer, run_step
from helpers import assert_exact
from tiny_engines import begin_requests

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
random_models, shapes = importlib.import_module("random_models"), importlib.import_module("shapes")

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SMALL = shapes.ModelShape(2, 128, 256, 2, 1, 64, 512)
TREES = {
    "plain": None,
    "dynamic": dict(tree="dynamic", top_k=4, max_depth=3, num_nodes=12),
    "dynamic-wide": dict(tree="dynamic", top_k=8, max_depth=6, num_nodes=60),
    "static": dict(tree="static"),
    "chain": dict(tree="chain", max_depth=4),
    "eagle-3": dict(tree="dynamic", top_k=4, max_depth=3, num_nodes=12),
    "eagle-3-chain": dict(tree="chain", max_depth=2),
}
trees = pytest.mark.parametrize("tree", TREES)


class CpuGraphs:
    """GraphApi without graphs: a replay runs the function, a copy is made at once."""

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def replay(self, graph: Callable[[], None]) -> None:
        graph()

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    def copy_to_host(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)

    def wait(self, copied: None) -> None:
        pass


def models(device: str, tree: str, deterministic: bool = True):
    """A target that follows the last token's embedding with noise, and a drafter that often agrees."""
    order = torch.randperm(SMALL.vocab)
    next_token = torch.empty_like(order)
    next_token[order] = order.roll(-1)
    target = random_models.random_target(SMALL, 2048, device=device, deterministic=deterministic, next_token=next_token.to(device), update=2.0)
    if tree.startswith("eagle-3"):
        return target, random_models.random_eagle3(target, SMALL, next_token=next_token.to(device))
    return target, None if tree == "plain" else random_models.random_drafter(target, SMALL, follows_embedding=True)


def engines(device: str, tree: str, **options) -> tuple[Engine, Engine]:
    """One that replays graphs and one that does not, on the same models."""
    target, drafter = models(device, tree)
    config = dict(max_model_len=1500, max_batch_size=3, page_size=16, deterministic=True) | (TREES[tree] or {}) | options
    graphed = Engine(target, drafter, None, EagleConfig(**config), eos_token_ids=(), graph_api=CpuGraphs() if device == "cpu" else None)
    return graphed, Engine(target, drafter, None, EagleConfig(**config, enforce_eager=True), eos_token_ids=())


def prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(0, SMALL.vocab, (length,)).tolist() for length in lengths]


SAMPLING = [SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=33), SamplingParams(temperature=0.7, top_k=20, seed=1, max_tokens=7)]


@devices
@trees
def test_captured_engine_emits_the_tokens_of_an_eager_one(tree: str, device: str) -> None:
    """Captured once on dummies, replayed over prompts of several lengths, alone and together; requests come and go."""
    graphed, eager = engines(device, tree)
    texts = prompts(1, 17, 63, 64, 300, 40, 5)
    params = [SAMPLING[i % len(SAMPLING)] for i in range(len(texts))]
    for chosen in (texts[:1], texts, texts[3:5]):
        expected = [output.token_ids for output in eager.generate(chosen, params[: len(chosen)])]
        assert [output.token_ids for output in graphed.generate(chosen, params[: len(chosen)])] == expected


@devices
@trees
def test_speculation_changes_no_token(tree: str, device: str) -> None:
    """With row-invariant kernels, at any temperature."""
    graphed, _ = engines(device, tree)
    texts = prompts(3, 70, 200)
    outputs = graphed.generate(texts, SAMPLING)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in graphed.plain().generate(texts, SAMPLING)]
    if tree != "plain":
        assert max(output.stats.acceptance_length for output in outputs) > 1.2  # something was drafted right


@devices
@trees
def test_an_eager_engine_can_be_observed(tree: str, device: str) -> None:
    graphed, eager = engines(device, tree)
    texts = prompts(3, 70, 200)
    seen: dict[int, list] = {}

    def observer(request_ids, observed) -> None:
        for request_id, one in zip(request_ids, observed):
            seen.setdefault(request_id, []).append(one)

    with eager.observing(observer):
        outputs = eager.generate(texts, SAMPLING)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in graphed.generate(texts, SAMPLING)]
    for output in outputs:
        steps = seen[output.request_id]
        assert len(steps) == output.stats.steps
        assert sum((one.emitted for one in steps), output.token_ids[:1])[: len(output.token_ids)] == output.token_ids
        # No child is likelier than its path, and no two paths together are likelier than certain.
        assert all(one.scores[node] <= one.scores[one.parent[node]] for one in steps for node in range(1, len(one.tokens)))
        assert all(sum(c for c, parent in zip(one.confidences, one.parent) if parent == 0) <= 1.001 for one in steps)
    with pytest.raises(EagleError, match="enforce_eager"), graphed.observing(observer):
        pass


def start(engine: Engine, lengths: tuple[int, ...]) -> None:
    """Prefilled requests that would go on for long."""
    for i, prompt in enumerate(prompts(*lengths)):
        engine.add_request(prompt, SamplingParams(temperature=0.0 if i % 2 == 0 else 0.8, seed=i, max_tokens=1100))
    with torch.inference_mode():
        begin_requests(engine)


def snapshot(engine: Engine) -> dict[str, torch.Tensor]:
    return {field.name: getattr(engine.state, field.name).clone() for field in fields(engine.state) if getattr(engine.state, field.name) is not None}


def restore(engine: Engine, saved: dict[str, torch.Tensor]) -> None:
    for name, tensor in saved.items():
        getattr(engine.state, name).copy_(tensor)


@devices
@trees
@torch.inference_mode()
def test_every_buffer_after_a_replay_is_that_of_an_eager_step(tree: str, device: str) -> None:
    graphed, _ = engines(device, tree)
    start(graphed, (30, 5, 120))
    for _ in range(6):
        before = snapshot(graphed)
        graphed._graphs.replay(3)
        replayed = snapshot(graphed)
        restore(graphed, before)
        run_step(graphed.models, graphed.state, 3, PhaseTimer())
        for name, tensor in snapshot(graphed).items():
            # The pool is scratch, and rows of the caches above the committed ones are too: but both come from the same kernels, so they agree as well.
            assert_exact(tensor.cpu(), replayed[name].cpu())


@devices
@pytest.mark.parametrize("tree", ["plain", "dynamic", "eagle-3"])
@torch.inference_mode()
def test_a_thousand_replays(tree: str, device: str) -> None:
    """Growing lengths, every hundredth replay against an eager step. Between replays the pages that nobody took are poisoned: a graph that remembers an old page or length reads NaN."""
    replays = 1000 if device == "cuda" else 20
    graphed, _ = engines(device, tree, max_batch_size=1)
    start(graphed, (40,))
    free = list(graphed.pages._free)
    for number in range(replays):
        if int(graphed.state.seq_lens[0]) > 1000:  # start over in the same buffers, before its pages end
            graphed.state.seq_lens[0] = 200
        check = number % (replays // 10) == 0
        if check:
            for cache in (graphed.state.target_cache, graphed.state.draft_cache):
                if cache is not None:
                    cache[:, :, free] = float("nan")
            before = snapshot(graphed)
        graphed._graphs.replay(1)
        if check:
            replayed = {name: getattr(graphed.state, name).clone() for name in ("output_ring", "seq_lens", "root_tokens", "pending_tokens", "pending_features")}
            after = snapshot(graphed)
            restore(graphed, before)
            run_step(graphed.models, graphed.state, 1, PhaseTimer())
            for name, tensor in replayed.items():
                assert_exact(getattr(graphed.state, name).cpu(), tensor.cpu())
            restore(graphed, after)
        assert int(graphed.state.root_tokens[0]) >= 0  # -1 would be a row of NaN
    assert graphed.state.output_ring[0, -1] >= replays


@pytest.mark.gpu
@torch.inference_mode()
def test_a_step_is_one_launch_and_one_copy_and_waits_for_nothing() -> None:
    """Counted by the profiler; torch itself raises where the host would wait for the device."""
    graphed, _ = engines("cuda", "dynamic", max_batch_size=1)
    start(graphed, (40,))
    graphed.step()
    graphed.step()
    torch.cuda.synchronize()
    steps = 20
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                graphed.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in profile.events()]
    assert sum("GraphLaunch" in name for name in names) == steps
    assert sum("Memcpy DtoH" in name for name in names) == steps
    assert not any("StreamSynchronize" in name or "DeviceSynchronize" in name for name in names[: -len(names) // 20])  # the profiler itself waits at its end


@pytest.mark.gpu
@torch.inference_mode()
def test_a_step_allocates_nothing() -> None:
    graphed, _ = engines("cuda", "dynamic-wide", max_batch_size=2)
    start(graphed, (40, 9))
    graphed.step()
    torch.cuda.synchronize()
    counters = ("allocation.all.allocated", "allocated_bytes.all.allocated", "num_device_alloc")
    before = [torch.cuda.memory_stats().get(name) for name in counters]
    for _ in range(50):
        graphed._graphs.replay(2)
    torch.cuda.synchronize()
    assert [torch.cuda.memory_stats().get(name) for name in counters] == before
