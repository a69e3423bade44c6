"""What the benchmarks share: timing on either device, tables; the device's ceilings are the package's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle_engine.machine_rates import Call, Ceilings, event_seconds, last_level_cache_bytes, measure_ceilings, median_seconds, wall_seconds


def repeat(calls: list[Call], count: int) -> Call:
    """All calls in their order, `count` times over."""

    def repeated() -> None:
        for _ in range(count):
            for call in calls:
                call()

    return repeated


def captured(run: Call) -> Call:
    """The replay of a CUDA graph of what `run` launches; run goes before once, to compile what is compiled on first use."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


GRAPH_CALLS = 64  # calls of a captured graph at least: at 2 us each, far more than the cost of launching it


def seconds_per_call(calls: dict[Any, list[Call]], rounds: int, device: str) -> dict[Any, float]:
    """Median seconds of one call of each key, whose list goes through as many copies of its inputs.

    CPU: wall time, Python's call included, of about a millisecond or all copies. CUDA: events around a captured graph of all copies, at least GRAPH_CALLS calls, so that gaps between kernels
    are included and Python is not.
    """
    runs, counts = {}, {}
    for key, copies in calls.items():
        if device == "cuda":
            times = -(-GRAPH_CALLS // len(copies))
            runs[key] = captured(repeat(copies, times))
        else:
            repeat(copies, 1)()
            times = max(1, int(1e-3 / max(wall_seconds(repeat(copies, 1)), 1e-9)))
            runs[key] = repeat(copies, times)
        counts[key] = times * len(copies)
    seconds = median_seconds(runs, rounds, event_seconds if device == "cuda" else wall_seconds)
    return {key: seconds[key] / counts[key] for key in seconds}


def parse_args(description: str, rounds: int, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """--device, --threads, --rounds, --json and --output, and what `add` adds; the threads are set."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help="timed runs of everything; medians are shown (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON to a file")
    if add is not None:
        add(parser)
    args = parser.parse_args()
    if args.rounds < 1 or (args.threads is not None and args.threads < 1):
        parser.error("--rounds and --threads must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def header(ceilings: Ceilings, device: str = "cpu") -> str:
    if device == "cuda":
        where, rate = torch.cuda.get_device_name(), "bf16"
    else:
        import eagle_kernels  # here, since the ceilings are asked for before the extension is built

        where, rate = f"CPU, {eagle_kernels.isa()}, {torch.get_num_threads()} threads", "fp32"
    return (
        f"{where}; read bandwidth {ceilings.read_bandwidth / 1e9:.1f} GB/s, copy {ceilings.copy_bandwidth / 1e9:.1f} GB/s, {rate} matrix product {ceilings.fma_rate / 1e9:.0f} GFLOP/s, "
        f"all measured in this run; last-level cache {last_level_cache_bytes(device) / 2**20:.0f} MiB"
    )


def measures(seconds: float, num_bytes: int, flops: int, ceilings: Ceilings, baseline: float | None) -> dict[str, float | None]:
    """A row: time, bytes and operations that the shapes ask for, rates, shares of the ceilings, and the time of PyTorch over ours."""
    return {
        "microseconds": seconds * 1e6,
        "bytes": num_bytes,
        "flops": flops,
        "gb_per_second": num_bytes / seconds / 1e9,
        "gflop_per_second": flops / seconds / 1e9,
        "share_of_bandwidth": num_bytes / seconds / ceilings.read_bandwidth,
        "share_of_copy": num_bytes / seconds / ceilings.copy_bandwidth,
        "share_of_fma_rate": flops / seconds / ceilings.fma_rate,
        "torch_over_ours": None if baseline is None else baseline / seconds,
    }


COLUMNS = f"{'us':>10}{'MB':>9}{'MFLOP':>9}{'GB/s':>8}{'GFLOP/s':>9}{'of read':>9}{'of copy':>9}{'of FMA':>8}{'torch/ours':>12}"


def columns(row: dict[str, Any]) -> str:
    ratio = "" if row["torch_over_ours"] is None else f"{row['torch_over_ours']:.2f}"
    return (
        f"{row['microseconds']:>10.1f}{row['bytes'] / 1e6:>9.2f}{row['flops'] / 1e6:>9.1f}{row['gb_per_second']:>8.1f}{row['gflop_per_second']:>9.1f}"
        f"{row['share_of_bandwidth']:>9.0%}{row['share_of_copy']:>9.0%}{row['share_of_fma_rate']:>8.0%}{ratio:>12}"
    )


def print_json(value: Any) -> None:
    print(json.dumps(value))
