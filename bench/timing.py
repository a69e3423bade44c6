"""What the benchmarks share: interleaved timing, the machine's two ceilings, tables."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import eagle_kernels


class Ceilings(NamedTuple):
    """What the machine reaches, measured in the same run as the kernels.

    read_bandwidth  bytes per second, reading a buffer much larger than the last-level cache
    fma_rate        floating-point operations per second of a large fp32 matrix product
    """

    read_bandwidth: float
    fma_rate: float


def last_level_cache_bytes() -> int:
    """Size of the largest cache of core 0; 32 MiB where the system does not say."""
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)


def median_seconds(calls: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """Median seconds of each call. The calls take turns, so that a machine that slows down slows all of them; one round goes before to warm up."""
    samples: dict[Any, list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            started = time.perf_counter()
            call()
            if number > 0:
                samples[key].append(time.perf_counter() - started)
    return {key: statistics.median(values) for key, values in samples.items()}


def repeat(call: Callable[[], object], count: int) -> Callable[[], None]:
    """The call `count` times over, for calls too short to time alone."""

    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated


def measure_ceilings(rounds: int = 7) -> Ceilings:
    buffer = torch.ones(max(4 * last_level_cache_bytes(), 128 << 20) // 4)
    size = 1024
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    seconds = median_seconds({"sum": lambda: buffer.sum(), "max": lambda: buffer.amax(), "dot": lambda: torch.dot(buffer, buffer), "gemm": lambda: torch.mm(a, b, out=out)}, rounds)
    return Ceilings(buffer.nbytes / min(seconds["sum"], seconds["max"], seconds["dot"]), 2 * size**3 / seconds["gemm"])


def parse_args(description: str, rounds: int, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """--threads, --rounds and --json, and what `add` adds; the threads are set."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help="timed runs of everything; medians are shown (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")
    if add is not None:
        add(parser)
    args = parser.parse_args()
    if args.rounds < 1 or (args.threads is not None and args.threads < 1):
        parser.error("--rounds and --threads must be at least 1")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def header(ceilings: Ceilings) -> str:
    return (
        f"CPU, {eagle_kernels.isa()}, {torch.get_num_threads()} threads; read bandwidth {ceilings.read_bandwidth / 1e9:.1f} GB/s, fp32 matrix product {ceilings.fma_rate / 1e9:.0f} GFLOP/s, "
        f"both measured in this run; last-level cache {last_level_cache_bytes() / 2**20:.0f} MiB"
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
        "share_of_fma_rate": flops / seconds / ceilings.fma_rate,
        "torch_over_ours": None if baseline is None else baseline / seconds,
    }


COLUMNS = f"{'us':>10}{'MB':>9}{'MFLOP':>9}{'GB/s':>8}{'GFLOP/s':>9}{'of read':>9}{'of FMA':>8}{'torch/ours':>12}"


def columns(row: dict[str, Any]) -> str:
    ratio = "" if row["torch_over_ours"] is None else f"{row['torch_over_ours']:.2f}"
    return (
        f"{row['microseconds']:>10.1f}{row['bytes'] / 1e6:>9.2f}{row['flops'] / 1e6:>9.1f}{row['gb_per_second']:>8.1f}{row['gflop_per_second']:>9.1f}"
        f"{row['share_of_bandwidth']:>9.0%}{row['share_of_fma_rate']:>8.0%}{ratio:>12}"
    )


def print_json(value: Any) -> None:
    print(json.dumps(value))
