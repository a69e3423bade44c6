"""tree_attention against its reference, and checks that need no oracle."""

import random
from dataclasses import dataclass

import pytest
import torch
from eagle_kernels import reference, tree_attention
from helpers import (
    PagedCache,
    assert_bad_tensors_refused,
    assert_close_fp32,
    assert_exact,
    assert_refused,
    make_paged_cache,
    packed_mask,
    parents_strategy,
    path_to_root,
    poison_rows,
    random_tree,
    strided_copy,
)
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    seq_lens: tuple[int, ...]
    num_nodes: int
    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    window: int
    soft_cap: float
    dtype: torch.dtype
    branching: str

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.seq_lens))
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return (
            f"len{lengths}-nodes{self.num_nodes}-kv{self.num_kv_heads}x{self.group}-dim{self.head_dim}-page{self.page_size}"
            f"-window{self.window}-cap{self.soft_cap}-{dtype}-{self.branching}"
        )


def random_cases(count: int) -> list[Case]:
    """Every value of every option appears; the combinations are drawn once, from a fixed seed."""
    pick = random.Random(20).choice
    options = {
        "group": [1, 3, 4, 8],
        "head_dim": [16, 64, 80, 96, 128, 256],
        "page_size": [1, 16, 64],
        "window": [0, 0, 1, 7, 70],
        "soft_cap": [0.0, 0.0, 5.0],
        "dtype": [torch.float32, torch.bfloat16],
        "branching": ["random", "chain", "star", "deep"],
        "num_nodes": [1, 2, 7, 26, 64, 65],
        "num_kv_heads": [1, 2, 3],
    }
    cases = []
    for i in range(count):
        seq_lens = tuple(pick([0, 1, 5, 63, 64, 65, 127, 128, 200]) for _ in range(pick([1, 1, 2, 3])))
        drawn = {name: values[i] if i < len(values) else pick(values) for name, values in options.items()}
        cases.append(Case(seq_lens, **drawn))
    return cases


def make_query(batch: int, num_queries: int, num_heads: int, head_dim: int) -> torch.Tensor:
    """The query part of a fused qkv buffer: last dimension contiguous, rows further apart than they are long."""
    fused = torch.full((batch, num_queries, (num_heads + 2) * head_dim), float("nan"))
    q = fused[..., : num_heads * head_dim].view(batch, num_queries, num_heads, head_dim)
    q.copy_(torch.randn(q.shape))
    return q


def check_against_reference(q: torch.Tensor, cache: PagedCache, mask: torch.Tensor | None, **options: float) -> None:
    out, lse = tree_attention(q, *cache, mask, return_lse=True, **options)
    oracle, oracle_lse = reference.tree_attention(q.double(), *cache, mask, return_lse=True, **options)
    plain, plain_lse = reference.tree_attention(q, *cache, mask, return_lse=True, **options)
    assert_close_fp32(out, oracle, plain)
    assert_close_fp32(lse, oracle_lse, plain_lse)
    assert_exact(tree_attention(q, *cache, mask, **options), out)


@pytest.mark.parametrize("case", random_cases(40), ids=str)
def test_matches_reference(case: Case, isa: str) -> None:
    batch = len(case.seq_lens)
    cache = make_paged_cache(
        case.seq_lens, case.num_nodes, case.page_size, case.num_kv_heads, case.head_dim, dtype=case.dtype
    )
    q = make_query(batch, case.num_nodes, case.num_kv_heads * case.group, case.head_dim)
    mask = packed_mask(random_tree(batch, case.num_nodes, case.branching))
    check_against_reference(q, cache, mask, window=case.window, soft_cap=case.soft_cap)


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("num_queries", [1, 2, 63, 100])
def test_causal_chunk(num_queries: int, window: int, isa: str) -> None:
    cache = make_paged_cache([0, 70], num_queries, 16, 2, 64)
    q = make_query(2, num_queries, 6, 64)
    check_against_reference(q, cache, None, window=window)


@pytest.mark.parametrize("num_nodes", [127, 128, 129, 192, 255, 256])
def test_masks_of_several_words(num_nodes: int, isa: str) -> None:
    parent = random_tree(1, num_nodes, "deep")
    cache = make_paged_cache([17], num_nodes, 16, 1, 16)
    check_against_reference(make_query(1, num_nodes, 2, 16), cache, packed_mask(parent))


@given(parent=parents_strategy(70), seq_len=st.integers(0, 80), seed=st.integers(0, 2**31), window=st.integers(0, 90))
def test_any_tree(isa: str, parent: list[int], seq_len: int, seed: int, window: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    cache = make_paged_cache([seq_len], len(parent), 16, 1, 16)
    q = make_query(1, len(parent), 2, 16)
    check_against_reference(q, cache, packed_mask(torch.tensor([parent], dtype=torch.int32)), window=window)


def test_draft_level_attends_to_its_ancestors_only(isa: str) -> None:
    """Queries of one level (fewer than the tentative rows), each with ancestors scattered over all earlier rows."""
    parent = random_tree(2, 40, "deep")
    level = packed_mask(parent)[:, 31:40].contiguous()
    cache = make_paged_cache([30, 3], 40, 16, 2, 64)
    q = make_query(2, 9, 4, 64)
    check_against_reference(q, cache, level)
    out = tree_attention(q, *cache, level)
    for b in range(2):
        for i in range(9):
            poisoned = cache.copy()
            visible = path_to_root(parent[b].tolist(), 31 + i)
            hidden = [int(cache.seq_lens[b]) + node for node in range(40) if node not in visible]
            poison_rows(poisoned, b, hidden, random.choice([float("nan"), float("inf")]))
            assert_exact(tree_attention(q, *poisoned, level)[b, i], out[b, i])


@pytest.mark.parametrize("window", [1, 5, 64, 65, 100])
def test_rows_before_the_window_are_not_read(window: int, isa: str) -> None:
    cache = make_paged_cache([130], 1, 16, 2, 64)
    q = make_query(1, 1, 4, 64)
    out = tree_attention(q, *cache, None, window=window)
    assert out.isfinite().all()
    poisoned = cache.copy()
    poison_rows(poisoned, 0, range(131 - window))
    assert_exact(tree_attention(q, *poisoned, None, window=window), out)
    poison_rows(poisoned, 0, [131 - window])
    assert tree_attention(q, *poisoned, None, window=window).isnan().all()


def test_window_counts_depth_not_rows(isa: str) -> None:
    """A sibling's row lies between a node and its parent; the node's own window does not count it."""
    parent = [-1, 0, 0, 0, 1]  # node 4 follows 0, 1: positions seq_len, seq_len + 1, seq_len + 2
    cache = make_paged_cache([10], 5, 16, 1, 16)
    q = make_query(1, 5, 1, 16)
    mask = packed_mask(torch.tensor([parent], dtype=torch.int32))
    out = tree_attention(q, *cache, mask, window=4)
    poisoned = cache.copy()
    poison_rows(poisoned, 0, range(9))
    assert_exact(tree_attention(q, *poisoned, mask, window=4)[0, 4], out[0, 4])
    poison_rows(poisoned, 0, [9])
    assert tree_attention(q, *poisoned, mask, window=4)[0, 4].isnan().all()


def test_no_key_gives_zeros_and_minus_infinity(isa: str) -> None:
    cache = make_paged_cache([0, 3], 4, 16, 1, 16)
    q = make_query(2, 2, 2, 16)
    mask = torch.tensor([[[0], [0b1001]], [[0], [0b1]]])
    out, lse = tree_attention(q, *cache, mask, return_lse=True)
    assert_exact(out[0, 0], torch.zeros(2, 16))
    assert_exact(lse[0, 0], torch.full((2,), -torch.inf))
    assert out[0, 1].ne(0).all() and lse[0, 1].isfinite().all() and lse[1].isfinite().all()
    check_against_reference(q, cache, mask)


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_scores_of_any_size(size: float, isa: str) -> None:
    # Sixteen sequences: a large score saturates the softmax, and then one sequence's error hangs on a single rounding.
    cache = make_paged_cache([90] * 16, 3, 16, 1, 64)
    q = make_query(16, 3, 2, 64) * size
    check_against_reference(q, cache, None)
    check_against_reference(q, cache, None, scale=0.3, soft_cap=20.0)


def test_nan_stays_in_its_query(isa: str) -> None:
    cache = make_paged_cache([20], 5, 16, 2, 64)
    q = make_query(1, 5, 4, 64)
    out = tree_attention(q, *cache, None)
    q[0, 2, 1, 7] = float("nan")
    with_nan = tree_attention(q, *cache, None)
    assert with_nan[0, 2, 1].isnan().all()
    with_nan[0, 2, 1] = out[0, 2, 1]
    assert_exact(with_nan, out)


def test_out_and_empty(isa: str) -> None:
    cache = make_paged_cache([20, 4], 5, 16, 2, 64)
    q = make_query(2, 5, 4, 64)
    out = torch.full((2, 5, 4, 64), float("nan"))
    assert tree_attention(q, *cache, None, out=out) is out
    assert_exact(out, tree_attention(q, *cache, None))
    nothing = PagedCache(cache.kv, cache.page_table[:0], cache.seq_lens[:0])
    out, lse = tree_attention(q[:0], *nothing, None, return_lse=True)
    assert out.shape == (0, 5, 4, 64) and lse.shape == (0, 5, 4)
    assert tree_attention(q[:, :0], *cache, None).shape == (2, 0, 4, 64)


def test_bad_input_is_named() -> None:
    cache = make_paged_cache([20, 4], 5, 16, 2, 64)
    arguments = {
        "q": make_query(2, 5, 4, 64),
        "kv_cache": cache.kv,
        "page_table": cache.page_table,
        "seq_lens": cache.seq_lens,
        "packed_ancestor_mask": packed_mask(random_tree(2, 5)),
        "out": torch.empty(2, 5, 4, 64),
    }
    assert_bad_tensors_refused(tree_attention, arguments, list(arguments), first="q")
    for name, tensor in [
        ("q", torch.randn(2, 5, 3, 64)),
        ("q", torch.randn(2, 5, 4, 60)),
        ("kv_cache", cache.kv[:1]),
        ("page_table", cache.page_table[:1]),
        ("seq_lens", cache.seq_lens[:1]),
        ("packed_ancestor_mask", torch.zeros(2, 4, 1, dtype=torch.int64)),
        ("packed_ancestor_mask", torch.zeros(2, 5, 5, dtype=torch.int64)),
        ("out", torch.empty(2, 5, 4, 32)),
    ]:
        with pytest.raises(ValueError, match=r"^\w+: expected"):
            tree_attention(**(arguments | {name: tensor}))
    assert_refused("seq_lens", lambda: tree_attention(**(arguments | {"seq_lens": cache.seq_lens[:1]})))


def test_strided_cache_is_a_layer_of_all_layers(isa: str) -> None:
    cache = make_paged_cache([20, 4], 5, 16, 2, 64, layers=3)
    q = make_query(2, 5, 4, 64)
    one = tree_attention(q, cache.kv[1], cache.page_table, cache.seq_lens)
    assert_exact(tree_attention(q, cache.kv[1].clone(), cache.page_table, cache.seq_lens), one)
    assert_exact(tree_attention(strided_copy(q), cache.kv[1], cache.page_table, cache.seq_lens), one)
