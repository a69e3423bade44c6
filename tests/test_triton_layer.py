"""The Triton kernels rms_norm, silu_mul, rope_store_kv and route_experts under the interpreter, against their references."""

import pytest
import torch
from eagle_kernels import reference
from eagle_kernels.triton.rms_norm import rms_norm
from eagle_kernels.triton.rope_store_kv import rope_store_kv
from eagle_kernels.triton.route_experts import route_experts
from eagle_kernels.triton.silu_mul import CONSTANTS, OPTIONS, _silu_mul_kernel, silu_mul
from helpers import ABSURD_PAGES, assert_bad_tensors_refused, assert_close_fp32, assert_exact, assert_refused, make_paged_cache, strided_copy
from interpreter import half_dtypes
from test_rope_store_kv import Case, make_rope_table
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.usefixtures("checked_launches")
NAN = float("nan")


def norm_oracle(h: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64, and as PyTorch has it: in fp32 with one rounding."""
    return reference.rms_norm(h.double(), weight.double(), 1e-5), reference.rms_norm(h.float(), weight, 1e-5).to(h.dtype)


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 64), (2, 2, 100), (3, 256), (2, 257), (2, 4096), (2, 4097), (1, 9000)], ids=str)
@half_dtypes
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool) -> None:
    x, weight = strided_copy((torch.randn(shape) * 3).to(dtype)), torch.randn(shape[-1])
    residual = torch.randn(shape).to(dtype) if with_residual else None
    h = x if residual is None else x + residual
    out = strided_copy(torch.zeros(shape, dtype=dtype))
    rms_norm(x, weight, 1e-5, residual, out)
    oracle, own = norm_oracle(h, weight)
    assert_close_fp32(out.float(), oracle, own.float())
    assert out._base.isnan().sum() == 5 * out.numel() // shape[-1]  # the poison around the rows is still there
    if residual is not None:
        assert_exact(residual, h)


def test_rms_norm_of_heads_in_a_fused_buffer() -> None:
    fused, weight = torch.full((3, 7 * 80), NAN).bfloat16(), torch.randn(80)
    heads = fused[:, 80 : 5 * 80].unflatten(1, (4, 80))
    heads.copy_(torch.randn(3, 4, 80))
    oracle, own = norm_oracle(heads.clone(), weight)
    rms_norm(heads, weight, 1e-5, None, heads)
    assert_close_fp32(heads.float(), oracle, own.float())
    assert fused.isnan().sum() == 3 * 3 * 80


def test_rms_norm_of_special_rows() -> None:
    x, weight = torch.randn(5, 50).bfloat16(), torch.randn(50)
    expected = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, None, expected)
    x[1, 3], x[2, 49], x[4] = NAN, float("inf"), 0.0
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-5, None, out)
    assert out[1].isnan().all() and out[2, 49].isnan() and out[4].eq(0).all()
    assert_exact(out[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("size", [1, 100, 1024, 1500])
@half_dtypes
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = (torch.randn(3, 2 * size) * 4).to(dtype)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -100.0, -60000.0, 60000.0
    out = strided_copy(torch.zeros(3, size, dtype=dtype))
    silu_mul(strided_copy(gate_up), out)
    own = reference.silu_mul(gate_up.float()).to(dtype)
    oracle = reference.silu_mul(gate_up.double())
    oracle = torch.where(oracle.abs() > torch.finfo(dtype).max, own.double(), oracle)  # both overflow in fp16
    assert_close_fp32(out.float(), oracle, own.float())
    assert out._base.isnan().sum() == 5 * 3


ROPE_CASES = [
    Case((0,), 1, 1, 1, 64, 1),
    Case((5, 0, 31), 3, 9, 3, 64, 16),
    Case((63, 1), 2, 4, 1, 80, 64, row_offset=3),
    Case((2, 3), 3, 8, 9, 96, 1, row_offset=5),
    Case((15,), 5, 8, 2, 128, 128),
    Case((1, 17), 2, 3, 3, 256, 16, row_offset=1),
    Case((3,), 2, 2, 1, 6, 4),
    Case((5, 31), 3, 0, 9, 64, 16),
]


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
@half_dtypes
def test_rope_store_kv(dtype: torch.dtype, case: Case) -> None:
    batch, heads, kv_heads, dim = len(case.seq_lens), case.num_heads, case.num_kv_heads, case.head_dim
    fused = strided_copy(torch.randn(batch, case.num_queries, (heads + 2 * kv_heads) * dim).to(dtype))
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (part.unflatten(-1, (count, dim)) for part, count in zip(fused.split([count * dim for count in counts], dim=-1), counts))
    before = fused._base.clone()
    position_ids, table = torch.randint(0, 300, (batch, case.num_queries)), make_rope_table(300, dim)
    cache = make_paged_cache(case.seq_lens, case.row_offset + case.num_queries, case.page_size, kv_heads, dim, dtype=dtype)
    # In fp32 and rounded once: the kernel's own operations, so its bits.
    plain, plain_q = cache.copy(), q.float()
    reference.rope_store_kv(plain_q, k.float(), v.float(), position_ids, table, *plain, case.row_offset)
    rope_store_kv(q, k, v, position_ids, table, *cache, case.row_offset)
    assert_exact(q, plain_q.to(dtype))
    assert_exact(cache.kv, plain.kv)
    q.copy_(before[..., 2 : 2 + heads * dim].unflatten(-1, (heads, dim)))
    assert_exact(fused._base, before)


def test_rope_store_kv_of_padded_rows() -> None:
    """Sequences without pages, with absurd pages, lengths and positions: nothing is written for them, and nothing outside the table is read."""
    batch, dim = 6, 64
    q, k, v = (torch.randn(batch, 2, heads, dim).bfloat16() for heads in (2, 1, 1))
    cache = make_paged_cache([3] * batch, 2, 4, 1, dim, dtype=torch.bfloat16)
    for b, page in enumerate((*ABSURD_PAGES, cache.kv.shape[1])):
        cache.page_table[b] = page
    cache.page_table[5], cache.seq_lens[5] = 0, -100
    before = cache.kv.clone()
    position_ids = torch.tensor([-1, 2**40, -(2**62), 300, 5, 2**31])[:, None].repeat(1, 2)
    rope_store_kv(q, k, v, position_ids, make_rope_table(300, dim), *cache, 0)
    assert_exact(cache.kv, before)
    assert q.isfinite().all()
    cache.page_table[:], cache.seq_lens[:] = 0, 4 * cache.page_table.shape[1]  # full: the next row is past the table
    rope_store_kv(q, k, v, position_ids, make_rope_table(300, dim), *cache, 0)
    assert_exact(cache.kv, before)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("experts, top_k", [(1, 1), (8, 2), (60, 4), (256, 8), (5, 5)])
def test_route_experts(experts: int, top_k: int, normalize: bool) -> None:
    for logits in (torch.randn(4, experts) * 3, torch.randn(4, experts).round(), torch.zeros(4, experts)):
        weights, ids = torch.full((4, top_k), NAN), torch.full((4, top_k), -9, dtype=torch.int32)
        route_experts(logits, normalize, weights, ids)
        oracle, expected_ids = reference.route_experts(logits.double(), top_k, normalize)
        assert_exact(ids, expected_ids)
        assert_close_fp32(weights, oracle, reference.route_experts(logits, top_k, normalize)[0])


def test_route_experts_chooses_different_experts_in_rows_of_nan() -> None:
    logits = torch.randn(3, 6)
    logits[0, 2], logits[1] = NAN, NAN
    weights, ids = torch.empty(3, 3), torch.empty(3, 3, dtype=torch.int32)
    route_experts(logits, True, weights, ids)
    assert ids[1].tolist() == [0, 1, 2] and 2 not in ids[0].tolist()
    assert_exact(ids[2], reference.route_experts(logits, 3)[1][2])


def test_rows_do_not_depend_on_their_company() -> None:
    x, weight, residual, gate_up, logits = torch.randn(33, 300).bfloat16(), torch.randn(300), torch.randn(33, 300).bfloat16(), torch.randn(33, 90).bfloat16(), torch.randn(33, 12)

    def norm(rows: slice) -> torch.Tensor:
        out, sums = torch.empty_like(x[rows]), residual[rows].clone()
        rms_norm(x[rows], weight, 1e-5, sums, out)
        return torch.cat((out, sums), -1)

    def gated(rows: slice) -> torch.Tensor:
        out = torch.empty_like(gate_up[rows, :45])
        silu_mul(gate_up[rows], out)
        return out

    def routed(rows: slice) -> torch.Tensor:
        weights, ids = torch.empty_like(logits[rows, :3]), torch.empty_like(logits[rows, :3], dtype=torch.int32)
        route_experts(logits[rows], True, weights, ids)
        return torch.cat((weights, ids.float()), -1)

    for op in (norm, gated, routed):
        together = op(slice(0, 33))
        for rows in (slice(0, 1), slice(4, 5), slice(2, 7), slice(32, 33)):
            assert_exact(op(rows), together[rows])


def test_an_unlisted_launch_is_caught() -> None:
    x = torch.zeros(1, 8).bfloat16()
    with pytest.raises(AssertionError, match="aot_cases"):
        _silu_mul_kernel[(1, 1)](x, x, 8, 8, 4, BLOCK=512, **OPTIONS)


def test_a_load_outside_of_every_argument_is_caught() -> None:
    x, out = torch.zeros(1, 8).bfloat16(), torch.zeros(1, 5).bfloat16()
    with pytest.raises(InterpreterError, match="load outside"):
        _silu_mul_kernel[(1, 1)](x, out, 8, 5, 5, **CONSTANTS, **OPTIONS)
    with pytest.raises(InterpreterError, match="store outside"):
        _silu_mul_kernel[(1, 1)](x, out[:, :3], 8, 3, 4, **CONSTANTS, **OPTIONS)


def test_empty() -> None:
    x = torch.empty(0, 64).bfloat16()
    rms_norm(x, torch.ones(64), 1e-5, None, x)
    silu_mul(x, x[:, :32])
    route_experts(torch.empty(0, 4), True, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32))
    cache = make_paged_cache([3], 2, 4, 1, 64, dtype=torch.bfloat16)
    before, none = cache.kv.clone(), torch.empty(1, 0, 1, 64).bfloat16()
    rope_store_kv(none, none, none, torch.empty(1, 0, dtype=torch.int64), make_rope_table(3, 64), *cache, 0)
    assert_exact(cache.kv, before)


def test_bad_input_is_named() -> None:
    x = torch.randn(4, 32).bfloat16()
    arguments = {"x": x, "weight": torch.randn(32), "residual": x.clone(), "out": x.clone()}
    call = lambda **tensors: rms_norm(eps=1e-5, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_shape=["x"], any_dtype=["x"], first="x")
    for name, bad in [("x", x.float()), ("x", x[0]), ("weight", torch.randn(31)), ("residual", x[:3]), ("out", x[:, :31])]:
        assert_refused(name, lambda: call(**(arguments | {name: bad})))

    arguments = {"gate_up": x, "out": x[:, :16].clone()}
    assert_bad_tensors_refused(silu_mul, arguments, list(arguments), any_dtype=["gate_up"], first="gate_up")
    for name, bad in [("gate_up", x[:, :31]), ("gate_up", x.float()), ("out", x[:, :15])]:
        assert_refused(name, lambda: silu_mul(**(arguments | {name: bad})))

    cache = make_paged_cache([5, 0], 3, 16, 2, 64, dtype=torch.bfloat16)
    q, k, v = (torch.randn(2, 3, heads, 64).bfloat16() for heads in (4, 2, 2))
    arguments = {"q": q, "k": k, "v": v, "position_ids": torch.zeros(2, 3, dtype=torch.int64), "rope_table": make_rope_table(9, 64)}
    arguments |= {"kv_cache": cache.kv, "page_table": cache.page_table, "seq_lens": cache.seq_lens}
    call = lambda row_offset=0, **tensors: rope_store_kv(row_offset=row_offset, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_dtype=["q"], first="q")
    for name, bad in [
        ("q", q.float()), ("q", q[..., :63]), ("k", k[:, :2]), ("v", v[:, :, :1]), ("position_ids", torch.zeros(2, 2, dtype=torch.int64)), ("rope_table", make_rope_table(9, 32)),
        ("kv_cache", cache.kv.half()), ("kv_cache", cache.kv[..., :1, :].contiguous()), ("seq_lens", cache.seq_lens[:1]), ("page_table", cache.page_table[:1]), ("row_offset", -1),
    ]:  # fmt: skip
        assert_refused(name, lambda: call(**(arguments | {name: bad})))

    arguments = {"router_logits": torch.randn(4, 6), "weights": torch.empty(4, 2), "expert_ids": torch.empty(4, 2, dtype=torch.int32)}
    call = lambda **tensors: route_experts(normalize=True, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), first="router_logits")
    for name, bad in [("router_logits", torch.randn(4, 257)), ("router_logits", torch.randn(4, 0)), ("expert_ids", torch.empty(4, 3, dtype=torch.int32))]:
        assert_refused(name, lambda: call(**(arguments | {name: bad})))
    assert_refused("top_k", lambda: call(**(arguments | {"weights": torch.empty(4, 7)})))
