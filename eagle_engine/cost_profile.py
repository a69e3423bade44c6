"""What a step costs on this machine, for each shape of tree, batch and context: measured once, kept in a file."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import eagle_kernels
import numpy as np
import torch

from eagle_engine.errors import EagleError
from eagle_engine.step import Models
from eagle_engine.tree_shape import TreeShape
from eagle_engine.weight_cache import cache_directory

FORMAT_VERSION = 3
SHORT, LONG = 64, 1024  # committed rows of the two contexts that are measured
ROUNDS = 7


@dataclass(frozen=True)
class CostProfile:
    """Seconds per step. Checked on creation; EagleError says what cannot be.

    shapes        (max_depth, num_nodes) of each shape; (0, 1) is plain decoding
    batches       batch sizes that were measured, ascending
    base          [shape][batch] at `SHORT` committed rows
    per_row       [shape] for each further committed row of each sequence
    context_rows  longest context that was measured
    """

    shapes: list[list[int]]
    batches: list[int]
    base: list[list[float]]
    per_row: list[float]
    context_rows: int

    def __post_init__(self) -> None:
        sizes, batches = len(self.shapes), len(self.batches)
        if len(self.base) != sizes or len(self.per_row) != sizes or any(len(row) != batches for row in self.base):
            raise EagleError(f"profile: expected seconds for each of {sizes} shapes and {batches} batch sizes")
        if self.batches != sorted(set(self.batches)):
            raise EagleError(f"profile: expected ascending batch sizes, got {self.batches}")
        if not all(0 < seconds < math.inf for row in self.base for seconds in row) or not all(0 <= seconds < math.inf for seconds in self.per_row):
            raise EagleError("profile: expected steps that take some time, and no less for more rows")

    def check_shapes(self, shapes: Sequence[TreeShape]) -> None:
        """EagleError unless it is a profile of these."""
        wanted = [[shape.max_depth, shape.num_nodes] for shape in shapes]
        if self.shapes != wanted or not self.batches:
            raise EagleError(f"profile: it was measured for other trees: expected (max_depth, num_nodes) {wanted}, got {self.shapes}")

    def seconds(self, shape: int, batch: int, context: float) -> float:
        """Of a step of `batch` sequences with `context` committed rows on average: linear between the batch sizes, and in the rows."""
        return float(np.interp(batch, self.batches, self.base[shape])) + self.per_row[shape] * batch * max(context - SHORT, 0.0)


UNMEASURED = CostProfile([], [], [], [], 0)  # of an engine that is tuned before its first request


def profile_file(models: Models, shapes: Sequence[TreeShape], max_batch: int, context_rows: int, late: bool) -> Path:
    """Where the profile of these models on this machine is kept: the name tells apart all that a step's time depends on. context_rows: as for measure_profile; late: steps are captured whole."""
    target, drafter = models.target, models.drafter
    what = [
        FORMAT_VERSION, str(target.config), str(drafter.config), drafter.vocab_size, drafter.window, str(target.dtype), str(target.device), target.deterministic, late, models.graphs is not None,
        max_batch, context_rows, shapes[-1].top_k, [(shape.max_depth, shape.num_nodes) for shape in shapes], _machine(target.device),
    ]  # fmt: skip
    return cache_directory() / "profiles" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


def load_profile(file: Path) -> CostProfile | None:
    """None when there is none, or it cannot be read (with a warning)."""
    try:
        return CostProfile(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"{file}: the profile cannot be read and is measured again ({error})", stacklevel=2)
        return None


def save_profile(file: Path, profile: CostProfile) -> None:
    """A cache that cannot be written costs a warning, and the next start's time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(profile), indent=1), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        warnings.warn(f"{file}: the profile could not be kept ({error})", stacklevel=2)


def measure_profile(
    prepare: Callable[[int, int], None], step: Callable[[int, int], None], shapes: Sequence[TreeShape], batches: Sequence[int], context_rows: int, progress: Callable[[str], None] = lambda _: None
) -> CostProfile:
    """Time steps, all shapes in turns, so that a machine that slows down slows all of them.

    prepare       prepare(batch, context) makes `batch` sequences of `context` committed rows
    step          step(batch, shape) runs one step over them, and waits for its end
    context_rows  longest context that there is room for, SHORT or more

    What disturbs a step makes it longer, never shorter. So of several rounds the least counts, and no step costs more than a larger one took.
    """

    def time_all(batch: int, context: int) -> list[float]:
        prepare(batch, context)
        least = [float("inf")] * len(shapes)
        for number in range(ROUNDS + 1):
            for shape in range(len(shapes)):
                start = time.perf_counter()
                step(batch, shape)
                if number > 0:  # the first is the warm-up
                    least[shape] = min(least[shape], time.perf_counter() - start)
        return _bounded_by_larger(least, shapes)

    base: list[list[float]] = [[] for _ in shapes]
    for batch in batches:
        progress(f"batch {batch}")
        for row, seconds in zip(base, time_all(batch, SHORT)):
            row.append(seconds)
    base = [list(np.minimum.accumulate(row[::-1])[::-1].tolist()) for row in base]
    per_row = [0.0] * len(shapes)
    if context_rows >= 2 * SHORT:
        progress(f"context {context_rows}")
        short, long = (time_all(1, context) for context in (SHORT, context_rows))
        per_row = [max(b - a, 0.0) / (context_rows - SHORT) for a, b in zip(short, long)]
    return CostProfile([[shape.max_depth, shape.num_nodes] for shape in shapes], list(batches), base, per_row, context_rows)


def _bounded_by_larger(seconds: list[float], shapes: Sequence[TreeShape]) -> list[float]:
    return [min(other for other, larger in zip(seconds, shapes) if larger.max_depth >= shape.max_depth and larger.num_nodes >= shape.num_nodes) for shape in shapes]


def _machine(device: torch.device) -> list[object]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), torch.__version__]
    return [platform.machine(), _cpu_name(), torch.get_num_threads(), eagle_kernels.isa()]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
