"""The Triton kernels linear, embedding and expert_linear under the interpreter, against fp64 products."""

import pytest
import torch
from eagle_kernels.triton.linear import embedding, expert_linear, linear
from helpers import assert_bad_tensors_refused, assert_close_fp32, assert_exact, assert_refused, strided_copy
from interpreter import half_dtypes

pytestmark = pytest.mark.usefixtures("checked_launches")
NAN = float("nan")
# rows, outputs, inputs: less than a tile, tiles with tails in each direction, whole tiles
SHAPES = [(1, 32, 128), (3, 5, 7), (5, 33, 130), (64, 64, 256), (65, 31, 1), (70, 70, 500), (1, 1, 129)]


def weight_with_guard(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous weight with NaN before and behind it."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 1024,), NAN, dtype=dtype)
    weight = buffer[512 : 512 + size].view(shape)
    return weight.copy_(torch.randn(shape))


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@half_dtypes
def test_linear(dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool) -> None:
    rows, outputs, depth = shape
    x, weight = strided_copy(torch.randn(rows, depth).to(dtype)), weight_with_guard(outputs, depth, dtype=dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    oracle, own = x.double() @ weight.double().T, x.float() @ weight.float().T
    if bias is not None:
        oracle, own = oracle + bias.double(), own + bias.float()
    for out_dtype in (dtype, torch.float32):
        out = strided_copy(torch.zeros(rows, outputs, dtype=out_dtype))
        linear(x, weight, bias, outputs, out)
        assert_close_fp32(out.float(), oracle, own.to(out_dtype).float())
        assert out._base.isnan().sum() == 5 * rows


@half_dtypes
def test_linear_rows_do_not_depend_on_their_company(dtype: torch.dtype, fixed_order_dot: None) -> None:
    x, weight, bias = torch.randn(66, 200).to(dtype), torch.randn(40, 200).to(dtype), torch.randn(40).to(dtype)

    def product(rows: list[int]) -> torch.Tensor:
        out = torch.empty(len(rows), 40)
        linear(x[rows], weight, bias, 40, out)
        return out

    together = product(list(range(66)))
    x[65] = NAN
    for rows in ([0], [3], [65, 3], [7, 64, 1, 2, 0], list(range(33)), [65] + list(range(64))):
        clean = [i for i, row in enumerate(rows) if row != 65]
        assert_exact(product(rows)[clean], together[[rows[i] for i in clean]])


def test_linear_columns_do_not_depend_on_their_company(fixed_order_dot: None) -> None:
    """A reduced head gives the same logits."""
    x, weight = torch.randn(3, 130).bfloat16(), torch.randn(50, 130).bfloat16()
    some, whole, part = torch.randperm(50)[:7], torch.empty(3, 50), torch.empty(3, 7)
    linear(x, weight, None, 50, whole)
    linear(x, weight[some], None, 7, part)
    assert_exact(part, whole[:, some])


@pytest.mark.parametrize("size", [1, 100, 1024, 1500])
@half_dtypes
def test_embedding(dtype: torch.dtype, size: int) -> None:
    weight, ids = weight_with_guard(9, size, dtype=dtype), torch.tensor([0, 8, 3, 3, -1, -(2**63), 9, 2**63 - 1])
    out = torch.full((8, size), NAN, dtype=dtype)
    embedding(ids, weight, 9, out)
    assert_exact(out, weight[[0, 8, 3, 3, 0, 0, 8, 8]])


@pytest.mark.parametrize("shape", [(4, 16, 256), (5, 17, 300), (3, 1, 1)], ids=str)
@half_dtypes
def test_expert_linear(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, outputs, depth = shape
    x, weight = strided_copy(torch.randn(rows, depth).to(dtype)), weight_with_guard(3, outputs, depth, dtype=dtype)
    expert_ids = torch.tensor([2, 0, 1, 2, 1], dtype=torch.int32)[:rows]
    chosen = weight[expert_ids.long()]
    oracle, own = (torch.einsum("mk,mnk->mn", x.to(kind), chosen.to(kind)) for kind in (torch.float64, torch.float32))
    for out_dtype in (dtype, torch.float32):
        out = strided_copy(torch.zeros(rows, outputs, dtype=out_dtype))
        expert_linear(x, weight, expert_ids, outputs, out)
        assert_close_fp32(out.float(), oracle, own.to(out_dtype).float())
        assert out._base.isnan().sum() == 5 * rows
        alone = torch.empty(1, outputs, dtype=out_dtype)
        expert_linear(x[1:2], weight, expert_ids[1:2], outputs, alone)
        assert_exact(alone, out[1:2])


def test_rows_without_an_expert_give_zeros() -> None:
    x, weight, out = torch.full((4, 8), NAN).half(), torch.full((2, 20, 8), NAN).half(), torch.full((4, 20), NAN).half()
    expert_linear(x, weight, torch.tensor([-1, 2, 2**31 - 1, -(2**31)], dtype=torch.int32), 20, out)
    assert_exact(out, torch.zeros(4, 20).half())


def test_empty() -> None:
    x, weight = torch.empty(0, 8).half(), torch.empty(4, 8).half()
    linear(x, weight, None, 4, x[:, :4])
    embedding(torch.empty(0, dtype=torch.int64), weight, 4, x)
    expert_linear(x, weight[None], torch.empty(0, dtype=torch.int32), 4, x[:, :4])


def test_bad_input_is_named() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    arguments = {"x": x, "weight": weight, "bias": torch.randn(5).bfloat16(), "out": torch.empty(3, 5).bfloat16()}
    call = lambda **tensors: linear(out_features=5, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_dtype=["x"], first="x")
    for name, bad in [("x", x.float()), ("weight", weight[:4]), ("weight", weight[:, :7].clone()), ("bias", torch.randn(4).bfloat16()), ("out", torch.empty(3, 4).bfloat16())]:
        assert_refused(name, lambda: call(**(arguments | {name: bad})))

    arguments = {"ids": torch.zeros(3, dtype=torch.int64), "weight": weight, "out": torch.empty(3, 8).bfloat16()}
    call = lambda **tensors: embedding(out_features=5, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_dtype=["weight"], first="ids")
    for name, bad in [("weight", weight.float()), ("weight", weight[:4]), ("out", torch.empty(3, 7).bfloat16()), ("out", torch.empty(3, 8))]:
        assert_refused(name, lambda: call(**(arguments | {name: bad})))

    arguments = {"x": x, "weight": weight[None], "expert_ids": torch.zeros(3, dtype=torch.int32), "out": torch.empty(3, 5).bfloat16()}
    call = lambda **tensors: expert_linear(out_features=5, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_dtype=["x"], first="x")
    for name, bad in [("x", x.float()), ("weight", weight[None, :, :7].clone()), ("expert_ids", torch.zeros(2, dtype=torch.int32)), ("out", torch.empty(3, 4).bfloat16())]:
        assert_refused(name, lambda: call(**(arguments | {name: bad})))
