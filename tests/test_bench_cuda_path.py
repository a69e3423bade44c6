"""The benchmarks as they run on a GPU, without one: tensors that are asked for on CUDA are made on the CPU, the Triton kernels are interpreted, and a graph is a function that is called again."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from eagle_kernels import pack_weight
from test_gpu_path import interpreted  # noqa: F401
from torch.overrides import TorchFunctionMode

BENCH = Path(__file__).parent.parent / "bench"
OPS = ("accept", "advance", "compact", "copy_rows", "expand_topk", "head_topk", "linear", "rerank", "rms_norm", "rope_store_kv", "sample", "silu_mul", "tree_attention")


class PretendCuda(TorchFunctionMode):
    """Devices named cuda become the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        here = lambda value: "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value  # noqa: E731
        return function(*map(here, args), **{name: here(value) for name, value in (kwargs or {}).items()})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, interpreted: Counter):  # noqa: F811
    """Imports a module of bench/, with small shapes and without what only a GPU has."""
    monkeypatch.syspath_prepend(str(BENCH))
    timing, cases, shapes = (importlib.import_module(name) for name in ("timing", "cases", "shapes"))
    small = shapes.ModelShape(2, 128, 64, 2, 1, 64, 200)
    instead = {
        "captured": lambda run: run, "event_seconds": timing.wall_seconds, "last_level_cache_bytes": lambda device: 1, "pack_weight": functools.partial(pack_weight, layout="rows"), "GRAPH_CALLS": 1,
        "measure_ceilings": lambda device: timing.Ceilings(1e10, 2e10, 1e11), "WORKLOADS": {"small": (small, cases.Tree(5, 3, 2, 150))}, "NODES": (3,), "PREFIXES": {"cuda": (70,)}, "PHASE_CALLS": 1,
        "MODELS": {"smollm2-135m": small, "llama-3.1-8b": small}, "SHAPES": {"small": small}, "STEPS": 2, "REPLAYS": 2,
    }  # fmt: skip

    def load(name: str):
        for module in (timing, cases, importlib.import_module("random_models"), importlib.import_module(name)):
            for attribute, value in instead.items():
                if hasattr(module, attribute):
                    monkeypatch.setattr(module, attribute, value)
        return sys.modules[name]

    load.calls = interpreted
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocated_bytes.all.allocated": 0})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return load


@pytest.mark.parametrize("op", OPS)
def test_op_cases_on_cuda(op: str, bench) -> None:
    module = bench(f"bench_{op}")
    cases, timing = importlib.import_module("cases"), importlib.import_module("timing")
    with PretendCuda():
        made = [case for case in module.cases("cuda") if "M=60" not in case.name]
        rows = cases.run_cases(made[:4], 1, "cuda", timing.Ceilings(1e10, 2e10, 1e11))
    assert rows and not any(row["errors"] for row in rows)
    launched = {"expand_topk": "head_topk"}.get(op, op)
    assert bench.calls[launched] > 0 or op in ("accept", "compact", "copy_rows", "rerank")


@pytest.mark.parametrize("drafter", ["eagle-1", "eagle-3"])
def test_step_on_cuda(drafter: str, bench) -> None:
    """Deterministic, since torch's CPU has no bf16 product with an fp32 result."""
    module = bench("bench_step")
    timing = importlib.import_module("timing")
    args = argparse.Namespace(
        model="small", num_nodes=5, max_depth=2, top_k=3, context=40, acceptance_length=2.0, draft_vocab=None, drafter=drafter, batch=1, deterministic=True, device="cuda", rounds=1
    )  # fmt: skip
    with PretendCuda():
        result = module.measure(args, timing.Ceilings(1e10, 2e10, 1e11))
    assert result["acceptance_length"] == 2.0 and result["bytes_allocated_by_replays"] == 0
    used = {"linear", "embedding", "rms_norm", "silu_mul", "rope_store_kv", "tree_attention", "sample", "advance", "head_topk"}
    assert used <= {name for name, count in bench.calls.items() if count > 0}
