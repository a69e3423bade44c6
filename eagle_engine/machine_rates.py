"""What this machine reaches: bandwidth and multiply rate, measured here and now, against which times are held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from eagle_kernels import linear, pack_weight

Call = Callable[[], object]


class Ceilings(NamedTuple):
    """What the device reaches, measured in the same run as the kernels.

    read_bandwidth  bytes per second, reading a buffer, by default one much larger than the last-level cache
    copy_bandwidth  bytes per second read and written together, copying such a buffer
    fma_rate        floating-point operations per second of a large matrix product, by default fp32 on the CPU, bf16 on CUDA; on the CPU torch's or that of eagle_kernels.linear, whichever is faster
    """

    read_bandwidth: float
    copy_bandwidth: float
    fma_rate: float


def last_level_cache_bytes(device: str = "cpu") -> int:
    """CPU: size of the largest cache of core 0; 32 MiB where the system does not say. CUDA: size of L2."""
    if device == "cuda":
        return torch.cuda.get_device_properties("cuda").L2_cache_size
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)


def median_seconds(calls: dict[Any, Call], rounds: int, timed: Callable[[Call], float] | None = None) -> dict[Any, float]:
    """Median seconds of each call. The calls take turns, so that a machine that slows down slows all of them; one round goes before to warm up."""
    timed = timed or wall_seconds
    samples: dict[Any, list[float]] = {key: [] for key in calls}
    for number in range(rounds + 1):
        for key, call in calls.items():
            seconds = timed(call)
            if number > 0:
                samples[key].append(seconds)
    return {key: statistics.median(values) for key, values in samples.items()}


def wall_seconds(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def event_seconds(call: Call) -> float:
    """Seconds between two CUDA events around the call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_ceilings(device: str = "cpu", rounds: int = 7, *, num_bytes: int | None = None, dtype: torch.dtype | None = None) -> Ceilings:
    """num_bytes: of the buffer; None: four times the last-level cache, on CUDA 1 GiB. dtype: of the product, which is 1024 x 1024 x 1024, on CUDA 8192 x 8192 x 8192; launches are included, and below 1 %."""
    if device == "cuda":
        count, size, default, timed = 1 << 28, 8192, torch.bfloat16, event_seconds
    else:
        count, size, default, timed = max(4 * last_level_cache_bytes(), 128 << 20) // 4, 1024, torch.float32, wall_seconds
    count, dtype = count if num_bytes is None else num_bytes // 4, dtype or default
    buffer, other = torch.ones(count, device=device), torch.empty(count, device=device)
    a, b, out = torch.randn(size, size, device=device).to(dtype), torch.randn(size, size, device=device).to(dtype), torch.empty(size, size, dtype=dtype, device=device)
    calls = {"sum": lambda: buffer.sum(), "max": lambda: buffer.amax(), "dot": lambda: torch.dot(buffer, buffer), "copy": lambda: other.copy_(buffer), "gemm": lambda: torch.mm(a, b, out=out)}
    if device == "cpu" and dtype == torch.float32:
        # torch's library is not the fastest on every processor: on Zen 5 it reaches half of what there is.
        weight = pack_weight(b)
        calls["linear"] = lambda: linear(a, weight, out=out)
    seconds = median_seconds(calls, rounds, timed)
    return Ceilings(buffer.nbytes / min(seconds["sum"], seconds["max"], seconds["dot"]), 2 * buffer.nbytes / seconds["copy"], 2 * size**3 / min(seconds[name] for name in ("gemm", "linear") if name in seconds))
