"""Every output row depends on that row's inputs alone, bit for bit: not on the rows beside it, the tree, the chunk or the threads."""

import random
from collections.abc import Callable

import eagle_kernels
import pytest
import torch
from eagle_kernels import (
    DraftPool,
    embedding,
    expand,
    expert_linear,
    filter_probs,
    head_topk,
    linear,
    logits_topk,
    pack_weight,
    rms_norm,
    rope_store_kv,
    sample,
    silu_mul,
    tree_attention,
)
from helpers import PagedCache, assert_exact, make_paged_cache, packed_mask, path_to_root, random_tree
from test_rope_store_kv import make_rope_table
from test_sample import make_parameters, make_penalties

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTHS = [0, 1, 62, 63, 64, 65, 127, 128, 129, 200]


def with_threads(count: int, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_num_threads(count)
    return call()


@pytest.mark.parametrize("shape", [(48, 576), (133, 1001), (17, 3)], ids=str)
@dtypes
def test_linear(dtype: torch.dtype, shape: tuple[int, int], isa: str, restore_num_threads: None) -> None:
    packed, bias = pack_weight(torch.randn(shape).to(dtype)), torch.randn(shape[0])
    x = torch.randn(64, shape[1])
    alone = torch.cat([with_threads(1, lambda: linear(x[m : m + 1], packed, bias)) for m in range(64)])
    for num_rows in range(1, 65):
        for num_threads in (1, 2):
            assert_exact(with_threads(num_threads, lambda: linear(x[:num_rows], packed, bias)), alone[:num_rows])
    place = torch.randperm(64)
    assert_exact(linear(x[place], packed, bias), alone[place])
    assert_exact(linear(x[:60].view(3, 4, 5, -1), packed, bias), alone[:60].view(3, 4, 5, -1))


@pytest.mark.parametrize("depth", [100, 1200, 3000])
@dtypes
def test_linear_of_many_rows(dtype: torch.dtype, depth: int, isa: str, restore_num_threads: None) -> None:
    """More than go through the weights together, which are fewer the wider they are."""
    packed, x = pack_weight(torch.randn(20, depth).to(dtype)), torch.randn(150, depth)
    expected = torch.cat([linear(x[m : m + 1], packed) for m in range(150)])
    for num_threads in (1, 2):
        for num_rows in (145, 150):
            assert_exact(with_threads(num_threads, lambda: linear(x[:num_rows], packed)), expected[:num_rows])
    experts, expert_ids = pack_weight(torch.randn(3, 20, depth).to(dtype)), torch.randint(0, 2, (150,), dtype=torch.int32)
    expected = torch.cat([expert_linear(x[m : m + 1], experts, expert_ids[m : m + 1]) for m in range(150)])
    assert_exact(expert_linear(x, experts, expert_ids), expected)


@dtypes
def test_embedding_of_many_rows(dtype: torch.dtype, isa: str, restore_num_threads: None) -> None:
    weight, ids = torch.randn(100, 71).to(dtype), torch.randint(-1, 100, (129,))
    packed = pack_weight(weight)
    for num_threads in (1, 2):
        assert_exact(with_threads(num_threads, lambda: embedding(ids, packed)), weight.float()[ids.clamp(min=0)])


@dtypes
def test_linear_columns_are_independent(dtype: torch.dtype, isa: str) -> None:
    """A reduced head (a subset of the rows of the weight) gives the same logits."""
    weight, x = torch.randn(100, 576).to(dtype), torch.randn(5, 576)
    subset = torch.randperm(100)[:37]
    assert_exact(linear(x, pack_weight(weight[subset])), linear(x, pack_weight(weight))[:, subset])


@dtypes
def test_expert_linear(dtype: torch.dtype, isa: str, restore_num_threads: None) -> None:
    packed, x = pack_weight(torch.randn(4, 50, 70).to(dtype)), torch.randn(40, 70)
    expert_ids = torch.randint(0, 4, (40,), dtype=torch.int32)
    expected = torch.cat([expert_linear(x[m : m + 1], packed, expert_ids[m : m + 1]) for m in range(40)])
    for num_threads in (1, 2):
        for num_rows in (2, 7, 40):
            assert_exact(with_threads(num_threads, lambda: expert_linear(x[:num_rows], packed, expert_ids[:num_rows])), expected[:num_rows])


@dtypes
def test_head_topk(dtype: torch.dtype, isa: str, restore_num_threads: None) -> None:
    features, packed, logits = torch.randn(33, 70), pack_weight(torch.randn(301, 70).to(dtype)), torch.randn(33, 301)
    for op in (lambda rows: head_topk(features[rows], packed, 10), lambda rows: logits_topk(logits[rows], 10)):
        together = with_threads(1, lambda: op(slice(0, 33)))
        for num_threads in (1, 2):
            for rows in (slice(0, 1), slice(5, 12), slice(0, 33)):
                for tensor, expected in zip(with_threads(num_threads, lambda: op(rows)), together):
                    assert_exact(tensor, expected[rows])


@pytest.mark.parametrize("hidden_size", [7, 100, 576, 2049])
def test_rms_norm_silu_mul_and_copy_rows(hidden_size: int, isa: str, restore_num_threads: None) -> None:
    x, residual, weight = torch.randn(70, hidden_size), torch.randn(70, hidden_size), torch.randn(hidden_size)
    gate_up = torch.randn(70, 2 * hidden_size)
    ops = [
        lambda rows: rms_norm(x[rows], weight, 1e-5),
        lambda rows: rms_norm(x[rows], weight, 1e-5, residual[rows].clone()),
        lambda rows: silu_mul(gate_up[rows]),
        lambda rows: copied(x[rows]),
    ]
    for op in ops:
        expected = torch.cat([with_threads(1, lambda: op(slice(m, m + 1))) for m in range(70)])
        for num_threads in (1, 2):
            for rows in (slice(0, 2), slice(3, 36), slice(0, 70)):
                assert_exact(with_threads(num_threads, lambda: op(rows)), expected[rows])


def copied(x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), 3 * x.shape[1]), float("nan"))
    eagle_kernels.copy_rows(x, out[:, x.shape[1] : 2 * x.shape[1]])
    return out


def test_sample_and_expand(isa: str, restore_num_threads: None) -> None:
    logits, parameters, penalties = torch.randn(33, 501), make_parameters(33, 501), make_penalties(33, 501)
    tensors = {"logits": logits} | parameters | penalties

    def draw(rows: slice) -> torch.Tensor:
        return sample(**{name: tensor[rows] for name, tensor in tensors.items()})

    def probs(rows: slice) -> torch.Tensor:
        return filter_probs(logits[rows], *(parameters[name][rows] for name in ("temperature", "top_k", "top_p", "min_p")))

    def scores(rows: slice) -> torch.Tensor:
        chosen = logits[None, rows]
        count = chosen.shape[1]
        pool = DraftPool(torch.zeros(1, 5 * count, dtype=torch.int64), torch.zeros(1, 5 * count), torch.zeros(1, 5 * count, dtype=torch.int32))
        root = torch.full((1, count), -1, dtype=torch.int32)
        expand(chosen, torch.zeros(1, count), root, torch.zeros(1, count, 1), torch.zeros(1, count, 1, dtype=torch.int64), pool, 0, 5, first_row=0, next_size=1)
        return pool.scores.view(count, 5)

    for op in (draw, probs, scores):
        expected = torch.cat([with_threads(1, lambda: op(slice(m, m + 1))) for m in range(33)])
        for num_threads in (1, 2):
            for rows in (slice(0, 33), slice(5, 12)):
                assert_exact(with_threads(num_threads, lambda: op(rows)), expected[rows])


def copy_rows(source: PagedCache, b: int, rows: list[int], *, num_tentative: int, page_size: int) -> PagedCache:
    """One sequence whose logical rows are these rows of sequence b, on other pages of another size; the last num_tentative are tentative."""
    kv_heads, head_dim = source.kv.shape[-2:]
    copy = make_paged_cache([len(rows) - num_tentative], num_tentative, page_size, kv_heads, head_dim, dtype=source.kv.dtype)
    for row, source_row in enumerate(rows):
        page, slot = copy.location(0, row)
        source_page, source_slot = source.location(b, source_row)
        copy.kv[:, page, slot] = source.kv[:, source_page, source_slot]
    return copy


def decode_alone(q: torch.Tensor, source: PagedCache, b: int, rows: list[int], **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain decoding: the last row is the one tentative row, all before it are committed. q [Hq, D]."""
    copy = copy_rows(source, b, rows, num_tentative=1, page_size=random.choice([1, 3, 16, 64]))
    out, lse = tree_attention(q[None, None], *copy, return_lse=True, **options)
    return out[0, 0], lse[0, 0]


OPTIONS = [{}, {"window": 1}, {"window": 20}, {"window": 64}, {"window": 100}, {"soft_cap": 5.0}, {"window": 70, "soft_cap": 5.0, "scale": 0.3}]
options_of_attention = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{name}{value}" for name, value in options.items()) or "plain")


@options_of_attention
@dtypes
@pytest.mark.parametrize("branching", ["random", "deep", "chain"])
def test_nodes_of_a_tree_equal_plain_decoding(branching: str, dtype: torch.dtype, options: dict[str, float], isa: str) -> None:
    """Every node of a tree gets the bits of its own root path decoded token by token."""
    seq_lens, num_nodes = random.sample(LENGTHS, 3), 26
    cache = make_paged_cache(seq_lens, num_nodes, 16, 2, 64, dtype=dtype)
    parent = random_tree(3, num_nodes, branching)
    q = torch.randn(3, num_nodes, 6, 64)
    out, lse = tree_attention(q, *cache, packed_mask(parent), return_lse=True, **options)
    for b, seq_len in enumerate(seq_lens):
        for node in range(num_nodes):
            path = path_to_root(parent[b].tolist(), node)
            rows = list(range(seq_len)) + [seq_len + ancestor for ancestor in path]
            alone, alone_lse = decode_alone(q[b, node], cache, b, rows, **options)
            assert_exact(out[b, node], alone)
            assert_exact(lse[b, node], alone_lse)


@pytest.mark.parametrize("num_nodes, seq_len", [(130, 60), (256, 1)])
def test_deep_trees_equal_plain_decoding(num_nodes: int, seq_len: int, isa: str) -> None:
    """Paths longer than a block of keys, masks of several words."""
    parent = random_tree(1, num_nodes, "chain")
    parent[0, num_nodes // 2] = 0
    cache = make_paged_cache([seq_len], num_nodes, 16, 1, 32)
    q = torch.randn(1, num_nodes, 2, 32)
    out = tree_attention(q, *cache, packed_mask(parent))
    for node in [*range(0, num_nodes, 7), num_nodes - 1]:
        rows = list(range(seq_len)) + [seq_len + ancestor for ancestor in path_to_root(parent[0].tolist(), node)]
        assert_exact(out[0, node], decode_alone(q[0, node], cache, 0, rows)[0])


@options_of_attention
@dtypes
@pytest.mark.parametrize("seq_len", [0, 1, 63, 64, 65])
def test_any_chunking_equals_plain_decoding(seq_len: int, dtype: torch.dtype, options: dict[str, float], isa: str) -> None:
    """A prompt in one chunk, in several, and token by token."""
    num_rows = 75
    cache = make_paged_cache([seq_len], num_rows, 16, 2, 64, dtype=dtype)
    q = torch.randn(1, num_rows, 4, 64)
    whole, whole_lse = tree_attention(q, *cache, return_lse=True, **options)
    for row in (0, 1, 10, 63, 64, 74):
        alone, alone_lse = decode_alone(q[0, row], cache, 0, list(range(seq_len + row + 1)), **options)
        assert_exact(whole[0, row], alone)
        assert_exact(whole_lse[0, row], alone_lse)
    for sizes in ([1] * num_rows, [64, 11], [11, 64], [7, 1, 30, 37], [37, 38]):
        start, parts = 0, []
        for size in sizes:
            committed = torch.tensor([seq_len + start], dtype=torch.int32)
            parts.append(tree_attention(q[:, start : start + size], cache.kv, cache.page_table, committed, **options))
            start += size
        assert_exact(torch.cat(parts, 1), whole)
    chain = packed_mask(random_tree(1, num_rows, "chain"))
    assert_exact(tree_attention(q, *cache, chain, **options), whole)


@pytest.mark.parametrize("group, head_dim", [(1, 80), (3, 64), (4, 16), (8, 128)])
def test_batches_and_heads_equal_singles(group: int, head_dim: int, isa: str, restore_num_threads: None) -> None:
    """Sequences of unequal length, query rows and KV heads: each alone."""
    cache = make_paged_cache(LENGTHS, 9, 16, 2, head_dim)
    parent = random_tree(len(LENGTHS), 9)
    q, mask = torch.randn(len(LENGTHS), 9, 2 * group, head_dim), packed_mask(parent)
    out = with_threads(1, lambda: tree_attention(q, *cache, mask))
    assert_exact(with_threads(2, lambda: tree_attention(q, *cache, mask)), out)
    for b in range(len(LENGTHS)):
        one = PagedCache(cache.kv, cache.page_table[b : b + 1], cache.seq_lens[b : b + 1])
        assert_exact(tree_attention(q[b : b + 1], *one, mask[b : b + 1]), out[b : b + 1])
        for node in (0, 4, 8):
            assert_exact(tree_attention(q[b : b + 1, node : node + 1], *one, mask[b : b + 1, node : node + 1]), out[b : b + 1, node : node + 1])
    for head in range(2):
        heads = slice(head * group, (head + 1) * group)
        kv = cache.kv[..., head : head + 1, :].contiguous()
        assert_exact(tree_attention(q[:, :, heads], kv, cache.page_table, cache.seq_lens, mask), out[:, :, heads])


def test_rope_store_kv(isa: str, restore_num_threads: None) -> None:
    batch, num_queries = 3, 9
    cache = make_paged_cache([5, 64, 0], num_queries, 16, 2, 64)
    q, k, v = torch.randn(batch, num_queries, 4, 64), torch.randn(batch, num_queries, 2, 64), torch.randn(batch, num_queries, 2, 64)
    position_ids, table = torch.randint(0, 99, (batch, num_queries)), make_rope_table(99, 64)
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        rotated, whole = q.clone(), cache.copy()
        rope_store_kv(rotated, k, v, position_ids, table, *whole)
        results.append((rotated, whole.kv))
    for tensor, expected in zip(results[1], results[0]):
        assert_exact(tensor, expected)
    rotated, single = q.clone(), cache.copy()
    for b in range(batch):
        for i in range(num_queries):
            part = slice(b, b + 1), slice(i, i + 1)
            rope_store_kv(rotated[part], k[part], v[part], position_ids[part], table, single.kv, single.page_table[b : b + 1], single.seq_lens[b : b + 1], i)
    assert_exact(rotated, results[0][0])
    assert_exact(single.kv, results[0][1])
