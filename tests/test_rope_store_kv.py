"""rope_store_kv against its reference."""

from dataclasses import dataclass

import pytest
import torch
from eagle_kernels import reference, rope_store_kv
from helpers import (
    PagedCache,
    assert_bad_tensors_refused,
    assert_close_fp32,
    assert_exact,
    assert_refused,
    make_paged_cache,
)


@dataclass(frozen=True)
class Case:
    seq_lens: tuple[int, ...]
    num_queries: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype = torch.float32
    row_offset: int = 0

    def __str__(self) -> str:
        lengths = ",".join(map(str, self.seq_lens))
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return (
            f"len{lengths}-q{self.num_queries}-heads{self.num_heads}/{self.num_kv_heads}-dim{self.head_dim}"
            f"-page{self.page_size}-{dtype}-offset{self.row_offset}"
        )


CASES = [
    Case((0,), 1, 1, 1, 16, 1),
    Case((5, 0, 64), 7, 9, 3, 64, 16),
    Case((5, 0, 64), 7, 9, 3, 64, 16, torch.bfloat16),
    Case((63, 1), 2, 4, 1, 80, 64, torch.float32, 3),
    Case((2, 3), 3, 8, 1, 96, 1, torch.bfloat16, 5),
    Case((15,), 70, 8, 2, 128, 16),
    Case((1, 17), 5, 3, 3, 256, 16, torch.bfloat16, 1),
    Case((5, 0, 64), 7, 0, 3, 64, 16, torch.bfloat16),
    Case((3,), 70, 0, 8, 80, 16),
]


def make_rope_table(max_positions: int, head_dim: int, base: float = 10000.0) -> torch.Tensor:
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def make_qkv(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of one fused buffer."""
    batch, heads, kv_heads, dim = len(case.seq_lens), case.num_heads, case.num_kv_heads, case.head_dim
    fused = torch.randn(batch, case.num_queries, (heads + 2 * kv_heads) * dim)
    split = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return tuple(part.unflatten(-1, (count, dim)) for part, count in zip(split, (heads, kv_heads, kv_heads)))


def make_inputs(case: Case) -> tuple[tuple[torch.Tensor, ...], PagedCache, torch.Tensor, torch.Tensor]:
    cache = make_paged_cache(
        case.seq_lens, case.row_offset + case.num_queries, case.page_size, case.num_kv_heads, case.head_dim, dtype=case.dtype
    )
    position_ids = torch.randint(0, 300, (len(case.seq_lens), case.num_queries))
    return make_qkv(case), cache, position_ids, make_rope_table(300, case.head_dim)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: Case, isa: str) -> None:
    (q, k, v), cache, position_ids, table = make_inputs(case)
    q_before, k_before, v_before = q.clone(), k.clone(), v.clone()
    plain_q, oracle_q = q.clone(), q.double()
    plain, oracle = cache.copy(), PagedCache(cache.kv.double(), cache.page_table, cache.seq_lens)
    reference.rope_store_kv(plain_q, k, v, position_ids, table, *plain, case.row_offset)
    reference.rope_store_kv(oracle_q, k.double(), v.double(), position_ids, table.double(), *oracle, case.row_offset)
    rope_store_kv(q, k, v, position_ids, table, *cache, case.row_offset)

    if case.num_heads > 0:
        assert not torch.equal(q, q_before) or position_ids.max() == 0
        assert_close_fp32(q, oracle_q, plain_q)
    assert_exact(k, k_before)
    assert_exact(v, v_before)
    assert_exact(cache.kv[1], plain.kv[1])
    for b, seq_len in enumerate(case.seq_lens):
        for i in range(case.num_queries):
            page, slot = cache.location(b, seq_len + case.row_offset + i)
            stored, expected = cache.kv[0, page, slot], plain.kv[0, page, slot]
            if case.dtype == torch.float32:
                assert_close_fp32(stored, oracle.kv[0, page, slot], expected)
            else:
                limit = 2 * (expected.double() - oracle.kv[0, page, slot]).abs().max()
                assert (stored.double() - oracle.kv[0, page, slot]).abs().max() <= limit
            cache.kv[0, page, slot] = expected  # so that the next line compares all other rows
    assert_exact(cache.kv, plain.kv)


def test_position_zero_is_the_identity(isa: str) -> None:
    case = Case((5, 0), 3, 4, 2, 64, 16)
    (q, k, v), cache, position_ids, table = make_inputs(case)
    q_before = q.clone()
    rope_store_kv(q, k, v, torch.zeros_like(position_ids), table, *cache)
    assert_exact(q, q_before)
    page, slot = cache.location(0, 6)
    assert_exact(cache.kv[0, page, slot], k[0, 1])


def test_scores_depend_on_the_distance_only(isa: str) -> None:
    case = Case((0,), 1, 1, 1, 64, 16)
    (q, k, v), cache, _, table = make_inputs(case)
    scores = []
    for query_position, key_position in [(12, 7), (205, 200)]:
        rotated, other = q.clone(), q.clone()
        rope_store_kv(rotated, k, v, torch.tensor([[query_position]]), table, *cache)
        rope_store_kv(other, k, v, torch.tensor([[key_position]]), table, *cache)
        page, slot = cache.location(0, 0)
        scores.append(float(rotated.flatten() @ cache.kv[0, page, slot].flatten()))
    assert scores[0] == pytest.approx(scores[1], rel=1e-4, abs=1e-4)


def test_bf16_rounds_to_nearest_even(isa: str) -> None:
    case = Case((0,), 1, 1, 1, 16, 1, torch.bfloat16)
    (q, k, v), cache, position_ids, table = make_inputs(case)
    v[..., :8] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2**-133, 1e-40, torch.inf, -0.0, 3.4e38])
    rope_store_kv(q, k, v, position_ids, table, *cache)
    page, slot = cache.location(0, 0)
    assert_exact(cache.kv[1, page, slot], v[0, 0].bfloat16())


def test_empty(isa: str) -> None:
    case = Case((5, 0), 3, 4, 2, 64, 16)
    (q, k, v), cache, position_ids, table = make_inputs(case)
    before = cache.kv.clone()
    rope_store_kv(q[:0], k[:0], v[:0], position_ids[:0], table, cache.kv, cache.page_table[:0], cache.seq_lens[:0])
    rope_store_kv(q[:, :0], k[:, :0], v[:, :0], position_ids[:, :0], table, *cache)
    assert_exact(cache.kv, before)


def test_bad_input_is_named() -> None:
    (q, k, v), cache, position_ids, table = make_inputs(Case((5, 0), 3, 4, 2, 64, 16))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "position_ids": position_ids,
        "rope_table": table,
        "kv_cache": cache.kv,
        "page_table": cache.page_table,
        "seq_lens": cache.seq_lens,
    }
    assert_bad_tensors_refused(rope_store_kv, arguments, list(arguments), first="q")
    for name, tensor in [
        ("k", k[..., :32]),
        ("v", v[:, :2]),
        ("position_ids", position_ids[:, :2]),
        ("rope_table", table[:, :32]),
        ("seq_lens", cache.seq_lens[:1]),
        ("page_table", cache.page_table[:1]),
        ("kv_cache", cache.kv[:1]),
    ]:
        assert_refused(name, lambda: rope_store_kv(**(arguments | {name: tensor})))
