"""The CUDA kernels of csrc/cuda, run on the CPU by tests/cuda_shim, against the references, byte for byte, for several orders of the threads."""

import math
import random

import pytest
import shim
import torch
from eagle_kernels import DraftPool, HeadTopK, reference
from helpers import assert_exact, make_paged_cache, parents_strategy, random_tree, strided_copy
from hypothesis import given
from hypothesis import strategies as st
from test_accept import OPTION_CASES, check_options
from test_compact import Case as CompactCase
from test_compact import make_accepted, random_path
from test_expand_topk import CASES as EXPAND_CASES
from test_expand_topk import Case as ExpandCase
from test_expand_topk import clone_arguments, make_head
from test_expand_topk import make_inputs as make_expand_inputs
from test_expand_topk import rows_alone, written
from test_rerank import check_tree, make_pool

SEEDS = range(8)


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    shim.require_compiler()
    shim.build("fibers")


def run(name: str, *args, seed: int | None = None, shifts: dict[int, int] | None = None, **kwargs):
    """The op on the shim: the same arguments, the same result."""
    case, result = shim.CASES[name](*args, **kwargs)
    shim.run(name, case, random.randrange(2**32) if seed is None else seed, shifts=shifts)
    return result


def assert_all_exact(actual, expected) -> None:
    for tensor, other in zip(actual, expected, strict=True):
        assert_exact(tensor, other)


def check_expand(arguments: dict[str, object], seed: int | None = None, shifts: dict[int, int] | None = None) -> None:
    expected_arguments = clone_arguments(arguments)
    expected = reference.expand_topk(**expected_arguments)
    actual = clone_arguments(arguments)
    result = run("expand_topk", **actual, seed=seed, shifts=shifts)
    assert_all_exact((*result, *written(actual)), (*expected, *written(expected_arguments)))


@pytest.mark.parametrize("case", EXPAND_CASES, ids=str)
def test_expand_topk(case: ExpandCase) -> None:
    arguments = make_expand_inputs(case)
    for seed in SEEDS:
        check_expand(arguments, seed)


@pytest.mark.parametrize("case", [
    ExpandCase(1, 64, 300, 16, 64, 64, num_words=8, first_row=400),
    ExpandCase(1, 64, 70, 16, 64, 4096, num_words=65),
    ExpandCase(1, 2, 4096, 1, 10, 10),
    ExpandCase(2, 17, 2000, 32, 40, 200, num_words=4, dtype=torch.bfloat16, hidden_size=33),
], ids=str)  # fmt: skip
def test_expand_topk_at_its_limits(case: ExpandCase) -> None:
    check_expand(make_expand_inputs(case))


@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, 3e38, -3e38, math.inf, -math.inf, math.nan]), min_size=9, max_size=9), min_size=3, max_size=3),
    scores=st.lists(st.sampled_from([0.0, -1.0, -1.0, math.inf, -math.inf, math.nan]), min_size=3, max_size=3),
    tile_size=st.integers(1, 10),
    top_k=st.integers(1, 9),
)
def test_expand_topk_of_special_values(rows: list[list[float]], scores: list[float], tile_size: int, top_k: int) -> None:
    arguments = make_expand_inputs(ExpandCase(1, 3, 9, tile_size, top_k, 5 if top_k > 1 else 3))
    arguments["head"] = make_head(torch.tensor([rows]), tile_size, top_k)
    arguments["frontier_scores"] = torch.tensor([scores])
    check_expand(arguments)


def test_expand_topk_rows_do_not_depend_on_each_other() -> None:
    """Blocks of 4 to 16 warps."""
    rows_alone(make_expand_inputs(ExpandCase(2, 10, 3000, 8, 6, 10)), lambda **arguments: run("expand_topk", **arguments))


def test_expand_topk_copies_strided_features() -> None:
    for dtype, hidden_size in [(torch.float32, 7), (torch.bfloat16, 8), (torch.float16, 3)]:
        arguments = make_expand_inputs(ExpandCase(2, 4, 50, 16, 4, 6, hidden_size=hidden_size, dtype=dtype))
        check_expand(arguments | {"features": strided_copy(arguments["features"])})


@pytest.mark.parametrize("features, next_features", [(8, 0), (0, 4), (2, 2), (0, 6)])
def test_expand_topk_copies_features_that_lie_anywhere(features: int, next_features: int) -> None:
    """Rows of whole vectors at addresses that are none: a narrower copy, not a fault."""
    check_expand(make_expand_inputs(ExpandCase(1, 3, 50, 16, 4, 6, hidden_size=64, dtype=torch.bfloat16)), shifts={5: features, 15: next_features})


def test_expand_topk_clamps_choices() -> None:
    arguments = make_expand_inputs(ExpandCase(1, 2, 20, 8, 3, 4))
    arguments["choices"] = torch.tensor([-5, 2, 6, 2**31 - 1], dtype=torch.int32)
    result = run("expand_topk", **arguments)
    assert (result.pool_index - arguments["pool_offset"]).tolist() == [[0, 2, 5, 5]]


def check_rerank(pool: DraftPool, num_nodes: int, choices: torch.Tensor | None = None, seed: int | None = None) -> None:
    batch = pool.tokens.shape[0]
    root_tokens, seq_lens = torch.randint(0, 1000, (batch,)), torch.randint(0, 5000, (batch,), dtype=torch.int32)
    tree = run("rerank", pool, root_tokens, seq_lens, num_nodes, choices=choices, seed=seed)
    assert_all_exact(tree, reference.rerank(pool, root_tokens, seq_lens, num_nodes, choices=choices))
    check_tree(tree, root_tokens, seq_lens)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "infinite"])
@pytest.mark.parametrize("batch, pool_size, num_nodes", [(1, 1, 1), (2, 1, 2), (3, 10, 6), (2, 110, 26), (1, 510, 65), (1, 700, 256), (1, 255, 256)])
def test_rerank(batch: int, pool_size: int, num_nodes: int, kind: str) -> None:
    pool = make_pool(batch, pool_size, kind)
    check_rerank(pool, num_nodes)
    if pool_size > 1:
        pool.scores[:] = torch.where(pool.scores == 0, torch.tensor([0.0, -0.0])[torch.randint(0, 2, pool.scores.shape)], pool.scores)
        check_rerank(pool, num_nodes)


@given(data=st.data(), size=st.integers(1, 60))
def test_rerank_any_pool(data: st.DataObject, size: int) -> None:
    parents, scores = [], []
    for slot in range(size):
        parents.append(data.draw(st.integers(-1, slot - 1)))
        parent_score = 0.0 if parents[-1] < 0 else scores[parents[-1]]
        scores.append(parent_score - data.draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, math.inf])))
    pool = DraftPool(torch.randint(0, 9, (1, size)), torch.tensor([scores]), torch.tensor([parents], dtype=torch.int32))
    check_rerank(pool, data.draw(st.integers(1, size + 1)))


def test_rerank_of_a_chain_and_of_choices() -> None:
    pool = make_pool(1, 255, "equal")
    pool.parents[:] = torch.arange(-1, 254)
    for seed in SEEDS:
        check_rerank(pool, 256, seed=seed)
    pool = make_pool(2, 40, "random")
    pool.parents[:] = torch.tensor([-1] * 4 + [slot // 4 - 1 for slot in range(4, 40)])
    check_rerank(pool, 8, torch.tensor([0, 1, 3, 4, 9, 16, 21], dtype=torch.int32))
    check_rerank(pool, 1, torch.tensor([], dtype=torch.int32))


def test_rerank_of_the_largest_pool() -> None:
    pool = DraftPool(torch.arange(20480)[None], torch.randn(1, 20480).round(decimals=2), torch.full((1, 20480), -1, dtype=torch.int32))
    check_rerank(pool, 256)
    larger = DraftPool(*(torch.cat((tensor, tensor[:, :1]), 1) for tensor in pool))
    with pytest.raises(AssertionError, match="launch error"):
        check_rerank(larger, 256)


def test_rerank_turns_an_orphan_into_a_node_that_is_never_accepted() -> None:
    """Slot 1 outranks its parent, slot 0; slot 3 is its child."""
    pool = DraftPool(torch.tensor([[10, 11, 12, 13]]), torch.tensor([[-9.0, -1.0, -0.5, -2.0]]), torch.tensor([[-1, 0, -1, 1]], dtype=torch.int32))
    tree = run("rerank", pool, torch.tensor([7]), torch.tensor([5], dtype=torch.int32), 4)
    assert tree.tokens.tolist() == [[7, -1, 12, 13]] and tree.parent.tolist() == [[-1, 0, 0, 1]]
    assert tree.depth.tolist() == [[0, 1, 1, 2]] and tree.packed_ancestor_mask.flatten().tolist() == [1, 3, 5, 11]


@pytest.mark.parametrize("batch, num_nodes, vocab_size, max_depth, num_stop_tokens, ring_size", OPTION_CASES)
def test_accept_with_stop_tokens_and_ring(batch: int, num_nodes: int, vocab_size: int, max_depth: int, num_stop_tokens: int, ring_size: int | None) -> None:
    for seed in SEEDS:
        check_options(batch, num_nodes, vocab_size, max_depth, num_stop_tokens, ring_size, lambda *args, **kwargs: run("accept", *args, **kwargs, seed=seed))


@pytest.mark.parametrize("branching", ["random", "chain", "star", "deep"])
@pytest.mark.parametrize("batch, num_nodes, vocab_size", [(1, 1, 3), (3, 2, 2), (4, 64, 2), (3, 65, 1), (2, 256, 1)])
def test_accept(batch: int, num_nodes: int, vocab_size: int, branching: str) -> None:
    parent = random_tree(batch, num_nodes, branching)
    tokens, sampled = torch.randint(0, vocab_size, (2, batch, num_nodes))
    active = torch.rand(batch) < 0.8
    for max_depth in {0, 3, num_nodes}:
        assert_all_exact(run("accept", tokens, parent, sampled, active, max_depth), reference.accept(tokens, parent, sampled, active, max_depth))


@given(parents=parents_strategy(70), data=st.data())
def test_accept_any_tree(parents: list[int], data: st.DataObject) -> None:
    values = st.lists(st.integers(-1, 1), min_size=len(parents), max_size=len(parents))
    tokens, sampled, parent = torch.tensor([data.draw(values)]), torch.tensor([data.draw(values)]), torch.tensor([parents], dtype=torch.int32)
    active, max_depth = torch.tensor([True]), data.draw(st.integers(0, 10))
    assert_all_exact(run("accept", tokens, parent, sampled, active, max_depth), reference.accept(tokens, parent, sampled, active, max_depth))


def test_accept_ring_with_an_absurd_counter_stays_inside() -> None:
    ring = torch.tensor([[-9] * 4 + [-(2**63)], [-9] * 4 + [2**63 - 2]])
    run("accept", torch.arange(4).repeat(2, 1), random_tree(2, 4, "chain"), torch.arange(1, 5).repeat(2, 1), torch.ones(2, dtype=torch.bool), 3, output_ring=ring)
    assert sorted(ring[0, :4].tolist()) == sorted(ring[1, :4].tolist()) == [1, 2, 3, 4]


def check_compact(cache, paths: list[list[int] | None], max_depth: int, seed: int | None = None, shifts: dict[int, int] | None = None) -> None:
    accepted = make_accepted(paths, max_depth)
    expected, actual = cache.copy(), cache.copy()
    reference.compact(*expected, *accepted)
    run("compact", *actual, *accepted, seed=seed, shifts=shifts)
    for tensor, other in zip(actual, expected):
        assert_exact(tensor, other)


@pytest.mark.parametrize("case", [
    CompactCase((5,), 1, 3, 1),
    CompactCase((7, 0, 31), 26, 6, 16),
    CompactCase((7, 31), 26, 6, 1, dtype=torch.bfloat16),
    CompactCase((63, 65), 60, 7, 64, 1, 80, 2),
    CompactCase((15, 16), 20, 19, 7, 1, 1, 1, torch.bfloat16),
    CompactCase((15, 16), 20, 19, 3, 1, 1, 1, torch.uint8),
    CompactCase((4,), 9, 5, 16, 3, 3, 1, torch.float32),
    CompactCase((3,), 8, 4, 16, 3, 200, 1, torch.float32),
    CompactCase((100,), 256, 255, 16, 1, 40, 1, torch.bfloat16),
], ids=str)  # fmt: skip
def test_compact(case: CompactCase) -> None:
    """Rows of 1, 2, 12, 36 bytes and multiples of 16; rows longer than a slice; as many accepted rows as there can be."""
    options = {"dtype": case.dtype, "layers": case.layers, "poison": float("nan") if case.dtype.is_floating_point else 99}
    cache = make_paged_cache(case.seq_lens, case.num_nodes, case.page_size, case.num_kv_heads, case.head_dim, **options)
    check_compact(cache, [random_path(case.num_nodes, case.max_depth) for _ in case.seq_lens], case.max_depth)


@given(seq_len=st.integers(0, 40), nodes=st.sets(st.integers(1, 29), max_size=8), page_size=st.sampled_from([1, 3, 16]), seed=st.integers(0, 2**31))
def test_compact_any_path(seq_len: int, nodes: set[int], page_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    check_compact(make_paged_cache([seq_len], 30, page_size, 1, 8, layers=1), [[0, *sorted(nodes)]], 8)


def test_compact_of_rows_that_are_source_and_destination() -> None:
    """Only such paths can tell whether all sources are read before anything is written."""
    cache = make_paged_cache([5], 30, 4, 2, 16, layers=2)
    for seed in range(8):
        check_compact(cache, [[0, 2, 3, 4]], 6, seed)
        check_compact(cache, [[0, *range(2, 25)]], 24, seed)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_compact_of_a_cache_that_lies_anywhere(shift: int) -> None:
    check_compact(make_paged_cache([5], 20, 4, 2, 16, layers=2), [[0, 2, 3, 7, 19]], 6, shifts={0: shift})


def test_launchers_refuse_what_does_not_fit() -> None:
    cache = make_paged_cache([5], 10, 16, 1, 4, layers=1)
    head = HeadTopK(torch.zeros(1, 1, 4097, 1, dtype=torch.int64), torch.zeros(1, 1, 4097), torch.zeros(1, 1, 4097))
    for call in (
        lambda: run("compact", *cache, torch.full((1, 257), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)),
        lambda: run("rerank", make_pool(1, 300, "random"), torch.tensor([1]), torch.tensor([1], dtype=torch.int32), 257),
        lambda: run("expand_topk", **(make_expand_inputs(ExpandCase(1, 1, 4, 4, 1, 1)) | {"head": head})),
    ):
        with pytest.raises(AssertionError, match="launch error 1"):
            call()


def test_empty_batches_launch_nothing() -> None:
    cache = make_paged_cache([5], 10, 16, 1, 4, layers=1)
    before = cache.kv.clone()
    run("compact", cache.kv, cache.page_table[:0], cache.seq_lens[:0], torch.zeros(0, 5, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    assert_exact(cache.kv, before)
    run("expand_topk", **make_expand_inputs(ExpandCase(0, 4, 50, 16, 4, 6)))
    run("rerank", make_pool(0, 10, "random"), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), 5)
    nothing = torch.zeros(0, 5, dtype=torch.int64)
    run("accept", nothing, nothing.int(), nothing, torch.zeros(0, dtype=torch.bool), 3)


def test_compact_leaves_inactive_rows_and_absurd_pages() -> None:
    cache = make_paged_cache([5, 9, 2], 10, 16, 2, 16, layers=2)
    cache.page_table[1] = torch.tensor(2**31 - 1)
    cache.page_table[2] = torch.tensor(-7)
    before = cache.kv.clone()
    accepted_nodes, num_accepted_drafts = make_accepted([None, [0, 2, 3], [0, 4]], 4)
    num_accepted_drafts[0] = 3  # what is left from an earlier step must not matter
    run("compact", *cache, accepted_nodes, num_accepted_drafts)
    assert_exact(cache.kv, before)


def test_real_threads_agree() -> None:
    """The other scheduler: a thread of the system per CUDA thread, blocks live together."""
    arguments = make_expand_inputs(ExpandCase(2, 4, 100, 16, 4, 6))
    expected_arguments = clone_arguments(arguments)
    expected = reference.expand_topk(**expected_arguments)
    case, result = shim.expand_topk_case(**arguments)
    shim.run("expand_topk", case, kind="threads")
    assert_all_exact((*result, *arguments["pool"]), (*expected, *expected_arguments["pool"]))


def test_the_shim_refuses_a_field_too_few_and_guards_its_buffers() -> None:
    case, result = shim.accept_case(torch.zeros(1, 3, dtype=torch.int64), random_tree(1, 3), torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, dtype=torch.bool), 2)
    with pytest.raises(AssertionError, match="launch error -2"):
        shim.run("accept", case[:-1])
    case[6] = result.accepted_nodes[:, :1].clone()  # the kernel is told of three columns
    with pytest.raises(AssertionError, match="wrote outside the buffer of field 6"):
        shim.run("accept", case)
