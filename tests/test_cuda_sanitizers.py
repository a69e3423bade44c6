"""The CUDA kernels under ThreadSanitizer (real threads, blocks live together) and AddressSanitizer with UndefinedBehaviorSanitizer (fibers): clean as they are, caught when a bug is planted in their source."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import shim
import torch
from eagle_kernels import DraftPool, reference
from helpers import assert_exact, make_paged_cache, random_tree
from test_compact import make_accepted
from test_expand_topk import Case as ExpandCase
from test_expand_topk import clone_arguments
from test_expand_topk import make_inputs as make_expand_inputs


class Planted(NamedTuple):
    """A bug: `text` of the kernel's source becomes `bug`; the sanitizer must say `report`."""

    kernel: str
    name: str
    kind: str
    text: str
    bug: str

    @property
    def report(self) -> str:
        return "data race" if self.kind == "tsan" else "AddressSanitizer: heap-buffer-overflow"


# fmt: off
PLANTED = [
    Planted("expand_topk", "ranks before all keys are there", "tsan", "    __syncthreads();\n\n    if (a.choices != nullptr) {", "    if (a.choices != nullptr) {"),
    Planted("expand_topk", "one node too many", "asan", "if (rank < next_size) chosen[rank] = c;", "if (rank <= next_size) chosen[rank] = c;"),
    Planted("expand_topk", "a tile too many", "asan", "first + 32 * i < tiles ?", "first + 32 * i <= tiles ?"),
    Planted("rerank", "no barrier in pointer doubling", "tsan", "        __syncthreads();  // all have read before any writes again\n", ""),
    Planted("rerank", "counts reused too early", "tsan", "        __syncthreads();  // counts have been read\n", ""),
    Planted("rerank", "a candidate too many", "asan", "i < a.pool; i += kRerankThreads", "i <= a.pool; i += kRerankThreads"),
    Planted("accept", "path written while others clear it", "tsan", "    __syncwarp();\n", ""),
    Planted("accept", "every lane writes the path", "tsan", "if (lane == 0) {\n            accepted[depth]", "{\n            accepted[depth]"),
    Planted("accept", "one node too deep", "asan", "return stopped || depth == a.max_depth;", "return stopped || depth > a.max_depth;"),
    Planted("accept", "one column beyond the ring", "asan", "column + depth < a.ring_size ?", "column + depth <= a.ring_size + 1 ?"),
    Planted("compact", "overlapping copy without waiting for the reads", "tsan", "    __syncthreads();  // every source has been read\n", ""),
    Planted(
        "compact", "overlapping copy without staging", "tsan",
        "if (source >= 0) staged[item] =", "if (source >= 0) reinterpret_cast<Vector*>(cache + to[item / vectors])[item % vectors] = staged[item] =",
    ),
    Planted("compact", "two blocks move the same rows", "tsan", "plane = rest / batch,", "plane = rest / batch / 2,"),
    Planted("compact", "a row too many", "asan", "i < moves; i += blockDim.x", "i <= moves; i += blockDim.x"),
]
# fmt: on


Checked = tuple[shim.Case, Callable[[], None]]  # a case, and what compares its result with the reference


def comparison(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    def compare() -> None:
        for tensor, other in zip(actual, expected, strict=True):
            assert_exact(tensor, other)

    return compare


def expand_topk_cases() -> list[Checked]:
    """33 tiles, so that a lane that minds several can look one too far; the next frontier by score, and by choices."""
    checked = []
    for static in (False, True):
        arguments = make_expand_inputs(ExpandCase(2, 6, 264, 8, 5, 7, dtype=torch.bfloat16, hidden_size=24, static=static))
        expected_arguments = clone_arguments(arguments)
        case, result = shim.expand_topk_case(**arguments)
        expected = reference.expand_topk(**expected_arguments)
        checked.append((case, comparison((*result, *arguments["pool"]), (*expected, *expected_arguments["pool"]))))
    return checked


def rerank_cases() -> list[Checked]:
    """A chain in a pool of 512, whole rounds of the threads, so that reading one candidate too many leaves the buffer; by score, and by choices."""
    pool = DraftPool(torch.randint(0, 1000, (1, 512)), -(torch.arange(512.0) // 3)[None], torch.arange(-1, 511, dtype=torch.int32)[None])
    root_tokens, seq_lens = torch.tensor([7]), torch.tensor([50], dtype=torch.int32)
    checked = []
    for choices in (None, torch.arange(69, dtype=torch.int32)):
        case, tree = shim.rerank_case(pool, root_tokens, seq_lens, 70, choices=choices)
        checked.append((case, comparison(tree, reference.rerank(pool, root_tokens, seq_lens, 70, choices=choices))))
    return checked


def accept_cases() -> list[Checked]:
    """Chains longer than max_depth that the target agrees with in full (the last row too: what it writes too far is outside the buffer), an inactive row, a row that stops."""
    tokens, parent = torch.full((4, 40), 3), random_tree(4, 40, "chain")
    tokens[2, 2] = 9
    sampled = tokens.roll(-1, 1)
    active, ring = torch.tensor([True, False, True, True]), torch.tensor([[-9] * 6 + [count] for count in (0, 4, 5, 3)])
    stop_token_ids, other_active, other_ring = torch.tensor([[9, -1]] * 4), active.clone(), ring.clone()
    case, accepted = shim.accept_case(tokens, parent, sampled, active, 5, stop_token_ids=stop_token_ids, output_ring=ring)
    expected = reference.accept(tokens, parent, sampled, other_active, 5, stop_token_ids=stop_token_ids, output_ring=other_ring)
    return [(case, comparison((*accepted, active, ring), (*expected, other_active, other_ring)))]


def compact_cases() -> list[Checked]:
    """Rows that are source and destination at once: other paths cannot show a race."""
    cache = make_paged_cache([5, 30], 30, 4, 2, 16, layers=2)
    expected, accepted = cache.copy(), make_accepted([[0, 2, 3, 4], [0, *range(2, 13)]], 11)
    reference.compact(*expected, *accepted)
    case, _ = shim.compact_case(*cache, *accepted)
    return [(case, comparison((cache.kv,), (expected.kv,)))]


CASES = {"accept": accept_cases, "compact": compact_cases, "expand_topk": expand_topk_cases, "rerank": rerank_cases}


@pytest.fixture(autouse=True)
def compiler() -> None:
    shim.require_compiler()


@pytest.mark.parametrize("kernel", CASES)
@pytest.mark.parametrize("kind", ["tsan", "asan"])
def test_clean(kernel: str, kind: str, tmp_path: Path) -> None:
    for case, compare in CASES[kernel]():
        done = shim.run_program(shim.build(kind), kernel, case, tmp_path, seed=3)
        assert done.returncode == 0, done.stderr
        compare()


def assert_caught(program: Path, kernel: str, report: str, directory: Path, attempts: int = 1) -> None:
    """One of the kernel's cases ends with a failure that matches `report`.

    Which races ThreadSanitizer sees depends on who runs when. Ten of ten runs showed each of the planted ones; three attempts leave room for a busy machine.
    """
    for seed in range(attempts):
        for case, _ in CASES[kernel]():
            done = shim.run_program(program, kernel, case, directory, seed)
            if done.returncode != 0 and re.search(report, done.stderr):
                return
    pytest.fail(f"not caught: exit status {done.returncode}\n{done.stderr}")


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.kernel}-{planted.name}".replace(" ", "_"))
def test_planted_bug_is_caught(planted: Planted, tmp_path: Path) -> None:
    program = shim.build(planted.kind, planted.kernel, (planted.text, planted.bug))
    assert_caught(program, planted.kernel, planted.report, tmp_path, attempts=3 if planted.kind == "tsan" else 1)


def test_every_kernel_has_a_planted_race_and_a_planted_overflow() -> None:
    kernels = {path.stem for path in shim.KERNELS.glob("*.cu")}
    assert kernels == set(CASES) == {planted.kernel for planted in PLANTED if planted.kind == "tsan"} == {planted.kernel for planted in PLANTED if planted.kind == "asan"}


def barriers(kernel: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"__sync(threads|warp)\(\);", (shim.KERNELS / f"{kernel}.cu").read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("kernel, number", [(kernel, number) for kernel in CASES for number in range(len(barriers(kernel)))])
def test_no_barrier_can_be_left_out(kernel: str, number: int, tmp_path: Path) -> None:
    """Each barrier removed in turn: a race is reported, or an index that was not written yet leads outside of memory."""
    source, (start, end) = (shim.KERNELS / f"{kernel}.cu").read_text(), barriers(kernel)[number]
    program = shim.build("tsan", kernel, (source, f"{source[:start]};{source[end:]}"))
    assert_caught(program, kernel, "data race|ThreadSanitizer: SEGV", tmp_path, attempts=3)


@pytest.mark.parametrize("text, bug", [
    ("    __syncthreads();\n\n    for (int j = warp_id();", "    if (warp_id() > 0) __syncthreads();\n\n    for (int j = warp_id();"),
    ("const float greatest = value_of_key(warp_max(best_tile));", "const float greatest = lane < 31 ? value_of_key(warp_max(best_tile)) : max[0];"),
], ids=["block", "warp"])  # fmt: skip
def test_a_barrier_that_not_all_threads_reach_is_reported(text: str, bug: str, tmp_path: Path) -> None:
    assert_caught(shim.build("asan", "expand_topk", (text, bug)), "expand_topk", "divergent barrier", tmp_path)
