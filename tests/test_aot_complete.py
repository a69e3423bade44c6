"""Whatever a launcher launches is compiled ahead of time: kernels are replaced by recorders, and every launch is looked up among the cases of aot_cases()."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from aot_compile import all_cases
from eagle_kernels import _cuda

CASES = all_cases()
HALF = (torch.bfloat16, torch.float16)
KINDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.uint8: "*u8"}


def key(kernel: str, constants: dict, options: dict, pointers: tuple[str, ...]) -> tuple:
    return kernel, tuple(sorted(constants.items())), tuple(sorted(options.items())), pointers


def known() -> dict[tuple, str]:
    keys = {}
    for case in CASES:
        pointers = tuple(kind for kind in case.signature.values() if kind.startswith("*"))
        keys[key(case.kernel.fn.__name__, {name: plain(value) for name, value in case.constants.items()}, case.options, pointers)] = case.name
    return keys


def plain(value: object) -> object:
    return getattr(value, "value", value)


class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self, kernel, launches: list[tuple]) -> None:
        self.kernel, self.launches = kernel, launches
        self.names = list(kernel.arg_names)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args, **kwargs) -> None:
            constants = {name: plain(value) for name, value in kwargs.items() if name in self.names}
            options = {name: value for name, value in kwargs.items() if name not in self.names}
            pointers = tuple(KINDS[arg.dtype] for arg in args if isinstance(arg, torch.Tensor))
            self.launches.append(key(self.kernel.fn.__name__, constants, options, pointers))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    recorded: list[tuple] = []
    for launcher in _cuda.LAUNCHERS.values():
        module = importlib.import_module(launcher.__module__)
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and hasattr(value, "arg_names"):
                monkeypatch.setattr(module, name, Recorder(value, recorded))
    yield recorded


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every launcher over every kind of argument that makes it choose: dtypes, sizes on both sides of each limit, optional tensors."""
    run = _cuda.LAUNCHERS
    for dtype in HALF:
        for head_dim, queries, window, soft_cap, deterministic, masked in itertools.product((64, 80, 96, 128, 256), (1, 32, 33, 256), (0, 9), (0.0, 5.0), (False, True), (False, True)):
            q, kv = empty(1, queries, 2, head_dim, dtype=dtype), empty(2, 4, 16, 1, head_dim, dtype=dtype)
            mask = longs(1, queries, 4) if masked else None
            yield "tree_attention", lambda: run["tree_attention"](q, kv, ints(1, 2), ints(1), mask, 1.0, window, soft_cap, deterministic, torch.empty_like(q), None if masked else empty(1, queries, 2))
        for rows, depth, bias, out_dtype in itertools.product((1, 64, 65), (128, 4096, 576, 24), (False, True), (dtype, torch.float32)):
            if not bias or out_dtype == dtype:
                x, weight = empty(rows, depth, dtype=dtype), empty(40, depth, dtype=dtype)
                yield "linear", lambda: run["linear"](x, weight, empty(40, dtype=dtype) if bias else None, 40, True, empty(rows, 40, dtype=out_dtype))
            if not bias and out_dtype == dtype:
                tiles = (empty(rows, 3), empty(rows, 3))
                yield "head_topk", lambda: run["head_topk"](empty(rows, depth, dtype=dtype), empty(130, depth, dtype=dtype), 130, longs(rows, 3, 5), *tiles)
        yield "embedding", lambda: run["embedding"](longs(3), empty(9, 40, dtype=dtype), 9, empty(3, 40, dtype=dtype))
        yield "expert_linear", lambda: run["expert_linear"](empty(3, 40, dtype=dtype), empty(2, 24, 40, dtype=dtype), ints(3), 24, empty(3, 24, dtype=dtype))
        for size, residual in itertools.product((64, 128, 576, 2048, 4096, 5120, 8192), (False, True)):
            x = empty(2, size, dtype=dtype)
            yield "rms_norm", lambda: run["rms_norm"](x, empty(size), 1e-5, torch.empty_like(x) if residual else None, torch.empty_like(x))
        yield "silu_mul", lambda: run["silu_mul"](empty(2, 80, dtype=dtype), empty(2, 40, dtype=dtype))
        for head_dim in (64, 80, 96, 128, 256, 512):
            k = empty(1, 2, 1, head_dim, dtype=dtype)
            yield "rope_store_kv", lambda: run["rope_store_kv"](empty(1, 2, 2, head_dim, dtype=dtype), k, torch.empty_like(k), longs(1, 2), empty(9, head_dim), empty(2, 4, 16, 1, head_dim, dtype=dtype), ints(1, 2), ints(1), 0)
    for dtype in (*HALF, torch.float32):
        features = empty(2, 5, 40, dtype=dtype)
        for missed in ((), (longs(2), longs(2, 7), empty(2, 7, 40, dtype=dtype))):
            yield "advance", lambda: run["advance"](longs(2, 5), features, ints(2, 3), ints(2), longs(2), torch.ones(2, dtype=torch.bool), ints(2), longs(2), longs(2), longs(2, 3), empty(2, 3, 40, dtype=dtype), *missed)
    for vocab in (50, 40_000):
        logits, filters, keys = empty(2, vocab), (empty(2), ints(2), empty(2), empty(2)), (longs(2), longs(2))
        extras = (empty(2, vocab), empty(2), empty(2), empty(2), torch.zeros(2, vocab, dtype=torch.bool), ints(2, vocab))
        yield "sample", lambda: run["sample"](logits, *filters, *keys, False, *(None,) * 6, longs(2), None)
        for chosen in itertools.product((False, True), repeat=6):
            yield "sample", lambda: run["sample"](logits, *filters, *keys, True, *(extra if take else None for extra, take in zip(extras, chosen)), longs(2), empty(2))
        yield "filter_probs", lambda: run["filter_probs"](logits, *filters, True, empty(2, vocab))
        yield "draw_children", lambda: run["draw_children"](logits, *filters, *keys, 2, False, longs(2, 3))
        yield "logits_topk", lambda: run["logits_topk"](logits, longs(2, -(-vocab // 1024), 5), empty(2, -(-vocab // 1024)), empty(2, -(-vocab // 1024)))
        for uniform in (False, True):
            yield "noise", lambda: run["noise"](*keys, 2, uniform, empty(2, vocab))
        yield "accept_rejection", lambda: run["accept_rejection"](longs(2, 4), ints(2, 4), empty(2, 4, vocab), empty(2, 4, vocab), *keys, torch.ones(2, dtype=torch.bool), ints(2, 3), ints(2), longs(2))
    for experts in (8, 200):
        yield "route_experts", lambda: run["route_experts"](empty(3, experts), True, empty(3, 2), ints(3, 2))


def test_every_launch_is_an_ahead_of_time_case_and_every_case_can_be_launched(launches: list[tuple]) -> None:
    cases, reached, called = known(), set(), set()
    for name, call in calls():
        launches.clear()
        call()
        assert launches, f"{name} launched nothing"
        called.add(name)
        for launch in launches:
            assert launch in cases, f"{name} launches what is not compiled ahead of time: {launch}"
            reached.add(cases[launch])
    assert called == set(_cuda.LAUNCHERS)
    unneeded = sorted(set(cases.values()) - reached)
    assert unneeded == [], "cases that no launch was seen to need"


def test_numbers_that_are_no_part_of_a_configuration_are_not_specialised_on() -> None:
    """Triton compiles another kernel for a number that happens to be 1, or a multiple of 16, unless it is told not to; such a kernel would be in no table."""
    for case in CASES:
        generic = set(case.kernel.kwargs.get("do_not_specialize") or ())
        loose = [name for name, kind in case.signature.items() if kind in ("i32", "i64") and name not in case.divisible_by_16 and name not in generic]
        assert not loose, f"{case.name}: {loose}"


def test_fused_multiply_adds_are_only_those_that_are_written() -> None:
    assert all(case.options["enable_fp_fusion"] is False for case in CASES)


def test_ops_can_be_registered_for_cuda() -> None:
    """As an import on a machine with CUDA does; here the key is there, if not the device."""
    library = torch.library.Library("eagle_kernels", "IMPL")
    try:
        for name, launcher in _cuda.LAUNCHERS.items():
            library.impl(name, launcher, "CUDA")
    finally:
        library._destroy()
