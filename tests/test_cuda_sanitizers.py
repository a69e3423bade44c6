"""The CUDA kernels under ThreadSanitizer (real threads, blocks live together) and AddressSanitizer with UndefinedBehaviorSanitizer (fibers): clean as they are, caught when a bug is planted in their source."""

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
from test_rerank import make_pool


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


def expand_topk_run(run: Callable[[shim.Case], None]) -> None:
    """33 tiles, so that a lane that minds several can look one too far."""
    arguments = make_expand_inputs(ExpandCase(2, 6, 264, 8, 5, 7, dtype=torch.bfloat16, hidden_size=24))
    expected_arguments = clone_arguments(arguments)
    case, result = shim.expand_topk_case(**arguments)
    run(case)
    expected = reference.expand_topk(**expected_arguments)
    for tensor, other in zip((*result, *arguments["pool"]), (*expected, *expected_arguments["pool"])):
        assert_exact(tensor, other)


def rerank_run(run: Callable[[shim.Case], None]) -> None:
    pool = make_pool(1, 512, "ties")  # of whole rounds of 512 threads, so that reading one candidate too many leaves the buffer
    pool = DraftPool(pool.tokens, pool.scores, torch.arange(-1, 511, dtype=torch.int32)[None])
    pool.scores[:] = -torch.arange(512) // 3
    root_tokens, seq_lens = torch.tensor([7]), torch.tensor([50], dtype=torch.int32)
    case, tree = shim.rerank_case(pool, root_tokens, seq_lens, 70)
    run(case)
    for tensor, other in zip(tree, reference.rerank(pool, root_tokens, seq_lens, 70)):
        assert_exact(tensor, other)


def accept_run(run: Callable[[shim.Case], None]) -> None:
    """Chains longer than max_depth that the target agrees with in full (the last row too: what it writes too far is outside the buffer), an inactive row, a row that stops."""
    tokens, parent = torch.full((4, 40), 3), random_tree(4, 40, "chain")
    tokens[2, 2] = 9
    sampled = tokens.roll(-1, 1)
    active, ring = torch.tensor([True, False, True, True]), torch.tensor([[-9] * 6 + [count] for count in (0, 4, 5, 3)])
    other_active, other_ring = active.clone(), ring.clone()
    options = {"stop_token_ids": torch.tensor([[9, -1]] * 4), "output_ring": ring}
    case, accepted = shim.accept_case(tokens, parent, sampled, active, 5, **options)
    run(case)
    expected = reference.accept(tokens, parent, sampled, other_active, 5, **(options | {"output_ring": other_ring}))
    for tensor, other in zip((*accepted, active, ring), (*expected, other_active, other_ring)):
        assert_exact(tensor, other)


def compact_run(run: Callable[[shim.Case], None]) -> None:
    """Rows that are source and destination at once: other paths cannot show a race."""
    cache = make_paged_cache([5, 30], 30, 4, 2, 16, layers=2)
    expected = cache.copy()
    accepted = make_accepted([[0, 2, 3, 4], [0, *range(2, 13)]], 11)
    case, _ = shim.compact_case(*cache, *accepted)
    run(case)
    reference.compact(*expected, *accepted)
    assert_exact(cache.kv, expected.kv)


RUNS = {"accept": accept_run, "compact": compact_run, "expand_topk": expand_topk_run, "rerank": rerank_run}


@pytest.fixture(autouse=True)
def compiler() -> None:
    shim.require_compiler()


@pytest.mark.parametrize("kernel", RUNS)
@pytest.mark.parametrize("kind", ["tsan", "asan"])
def test_clean(kernel: str, kind: str, tmp_path: Path) -> None:
    program = shim.build(kind)

    def run(case: shim.Case) -> None:
        done = shim.run_program(program, kernel, case, tmp_path, seed=3)
        assert done.returncode == 0, done.stderr

    RUNS[kernel](run)


class Caught(Exception):
    """Ends a run whose result does not matter."""


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.kernel}-{planted.name}".replace(" ", "_"))
def test_planted_bug_is_caught(planted: Planted, tmp_path: Path) -> None:
    program = shim.build(planted.kind, planted.kernel, (planted.text, planted.bug))

    def run(case: shim.Case) -> None:
        # A race that ThreadSanitizer sees depends on who runs when: ten of ten runs caught each of these, three attempts leave room for a busy machine.
        for seed in range(3 if planted.kind == "tsan" else 1):
            done = shim.run_program(program, planted.kernel, case, tmp_path, seed)
            if done.returncode != 0 and planted.report in done.stderr:
                raise Caught
        pytest.fail(f"not caught: exit status {done.returncode}\n{done.stderr}")

    with pytest.raises(Caught):
        RUNS[planted.kernel](run)


def test_every_kernel_has_a_planted_race_and_a_planted_overflow() -> None:
    kernels = {path.stem for path in shim.KERNELS.glob("*.cu")}
    assert kernels == set(RUNS) == {planted.kernel for planted in PLANTED if planted.kind == "tsan"} == {planted.kernel for planted in PLANTED if planted.kind == "asan"}


@pytest.mark.parametrize("kernel, text, bug", [
    ("expand_topk", "    __syncthreads();\n\n    for (int j = warp_id();", "    if (warp_id() > 0) __syncthreads();\n\n    for (int j = warp_id();"),
    ("expand_topk", "const float greatest = value_of_key(warp_max(best_tile));", "const float greatest = lane < 31 ? value_of_key(warp_max(best_tile)) : max[0];"),
], ids=["block", "warp"])  # fmt: skip
def test_a_barrier_that_not_all_threads_reach_is_reported(kernel: str, text: str, bug: str, tmp_path: Path) -> None:
    program = shim.build("asan", kernel, (text, bug))

    def run(case: shim.Case) -> None:
        done = shim.run_program(program, kernel, case, tmp_path, seed=3)
        assert done.returncode == 70 and "divergent barrier" in done.stderr, f"exit status {done.returncode}\n{done.stderr}"
        raise Caught

    with pytest.raises(Caught):
        RUNS[kernel](run)
