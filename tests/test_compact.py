"""compact against its reference: bytes of the whole cache, poison included."""

import random
from dataclasses import dataclass

import pytest
import torch
from eagle_kernels import compact, reference
from helpers import PagedCache, assert_bad_tensors_refused, assert_exact, assert_refused, make_paged_cache
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    seq_lens: tuple[int, ...]
    num_nodes: int
    max_depth: int
    page_size: int
    num_kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.seq_lens))
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return f"len{lengths}-nodes{self.num_nodes}-depth{self.max_depth}-page{self.page_size}-kv{self.num_kv_heads}x{self.head_dim}-layers{self.layers}-{dtype}"


CASES = [
    Case((0,), 1, 0, 16),
    Case((5,), 1, 3, 1),
    Case((7, 0, 31), 26, 6, 16),
    Case((7, 0, 31), 26, 6, 1, dtype=torch.bfloat16),
    Case((63, 64, 65), 60, 7, 64, 1, 80, 3),
    Case((100,), 256, 20, 16, 3, 64, 1, torch.bfloat16),
    Case((15, 16), 20, 19, 16, 1, 1, 1, torch.bfloat16),
]


def random_path(num_nodes: int, max_depth: int) -> list[int]:
    length = random.randint(0, min(max_depth, num_nodes - 1))
    return [0] + sorted(random.sample(range(1, num_nodes), length))


def make_accepted(paths: list[list[int] | None], max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """None: an inactive row."""
    nodes = [[-1] * (max_depth + 1) if path is None else path + [-1] * (max_depth + 1 - len(path)) for path in paths]
    counts = [0 if path is None else len(path) - 1 for path in paths]
    return torch.tensor(nodes, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)


def check(cache: PagedCache, paths: list[list[int] | None], max_depth: int) -> None:
    accepted = make_accepted(paths, max_depth)
    expected, before = cache.copy(), cache.copy()
    reference.compact(*expected, *accepted)
    compact(*cache, *accepted)
    assert_exact(cache.kv, expected.kv)
    assert_exact(cache.seq_lens, before.seq_lens)
    for b, path in enumerate(paths):
        for i, node in enumerate(path or []):
            page, slot = cache.location(b, int(cache.seq_lens[b]) + i)
            source_page, source_slot = cache.location(b, int(cache.seq_lens[b]) + node)
            assert_exact(cache.kv[:, :, page, slot], before.kv[:, :, source_page, source_slot])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: Case, isa: str) -> None:
    for _ in range(3):
        cache = make_paged_cache(case.seq_lens, case.num_nodes, case.page_size, case.num_kv_heads, case.head_dim, dtype=case.dtype, layers=case.layers)
        check(cache, [random_path(case.num_nodes, case.max_depth) for _ in case.seq_lens], case.max_depth)


@given(
    seq_len=st.integers(0, 40),
    nodes=st.sets(st.integers(1, 29), max_size=8),
    page_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 2**31),
)
def test_any_path(isa: str, seq_len: int, nodes: set[int], page_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    check(make_paged_cache([seq_len], 30, page_size, 1, 8, layers=2), [[0, *sorted(nodes)]], 8)


def test_inactive_rows_do_not_move(isa: str) -> None:
    cache = make_paged_cache([5, 9, 2], 10, 16, 2, 16, layers=2)
    cache.page_table[1] = torch.tensor(2**31 - 1)  # an inactive sequence has no pages
    before = cache.kv.clone()
    accepted_nodes, num_accepted_drafts = make_accepted([None, None, None], 4)
    num_accepted_drafts[1] = 3  # what is left from an earlier step must not matter
    compact(*cache, accepted_nodes, num_accepted_drafts)
    assert_exact(cache.kv, before)


def test_columns_after_the_end_are_not_read(isa: str) -> None:
    cache = make_paged_cache([5], 10, 16, 2, 16, layers=2)
    accepted_nodes, num_accepted_drafts = make_accepted([[0, 2, 7]], 5)
    expected = cache.copy()
    compact(*expected, accepted_nodes, num_accepted_drafts)
    accepted_nodes[0, 3:] = 2**31 - 1
    compact(*cache, accepted_nodes, num_accepted_drafts)
    assert_exact(cache.kv, expected.kv)


def test_empty_batch(isa: str) -> None:
    cache = make_paged_cache([5], 10, 16, 2, 16, layers=2)
    before = cache.kv.clone()
    compact(cache.kv, cache.page_table[:0], cache.seq_lens[:0], *(tensor[:0] for tensor in make_accepted([[0, 2]], 5)))
    assert_exact(cache.kv, before)


def test_bad_input_is_named() -> None:
    cache = make_paged_cache([5, 3], 10, 16, 2, 16, layers=2)
    accepted_nodes, num_accepted_drafts = make_accepted([[0, 2], [0]], 5)
    arguments = {
        "kv_cache": cache.kv,
        "page_table": cache.page_table,
        "seq_lens": cache.seq_lens,
        "accepted_nodes": accepted_nodes,
        "num_accepted_drafts": num_accepted_drafts,
    }
    assert_bad_tensors_refused(compact, arguments, list(arguments), any_dtype=["kv_cache"], first="kv_cache")
    for name in ("seq_lens", "accepted_nodes", "num_accepted_drafts"):
        assert_refused(name, lambda: compact(**(arguments | {name: arguments[name][:1]})))
