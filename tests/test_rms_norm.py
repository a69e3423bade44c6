"""rms_norm against its reference."""

import pytest
import torch
from eagle_kernels import reference, rms_norm
from helpers import assert_bad_tensors_refused, assert_close_fp32, assert_exact, assert_refused, strided_copy

SIZES = [1, 7, 8, 15, 64, 100, 576, 1000, 4096]


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("hidden_size", SIZES)
def test_matches_reference(hidden_size: int, with_residual: bool, isa: str) -> None:
    x, weight = torch.randn(2, 3, hidden_size) * 3, torch.randn(hidden_size)
    residual = torch.randn_like(x) if with_residual else None
    sum_in_fp32 = x if residual is None else x + residual
    y = rms_norm(x, weight, 1e-5, residual)
    oracle = reference.rms_norm(sum_in_fp32.double(), weight.double(), 1e-5)
    assert_close_fp32(y, oracle, reference.rms_norm(sum_in_fp32, weight, 1e-5))
    if residual is not None:
        assert_exact(residual, sum_in_fp32)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1e3, 1e6])
def test_values_of_any_size(size: float, isa: str) -> None:
    x, weight = torch.randn(5, 100) * size, torch.randn(100)
    oracle = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert_close_fp32(rms_norm(x, weight, 1e-6), oracle, reference.rms_norm(x, weight, 1e-6))


def test_zero_row_gives_zeros(isa: str) -> None:
    assert_exact(rms_norm(torch.zeros(3, 40), torch.ones(40), 1e-5), torch.zeros(3, 40))


def test_nan_and_infinity_stay_in_their_row(isa: str) -> None:
    x, weight = torch.randn(4, 50), torch.randn(50)
    y = rms_norm(x, weight, 1e-5)
    x[1, 3], x[2, 49] = float("nan"), float("inf")
    with_nan = rms_norm(x, weight, 1e-5)
    assert with_nan[1].isnan().all() and with_nan[2, 49].isnan()
    assert_exact(with_nan[[0, 3]], y[[0, 3]])


def test_strided_rows(isa: str) -> None:
    x, weight, residual = torch.randn(5, 33), torch.randn(33), torch.randn(5, 33)
    other_residual, out = residual.clone(), strided_copy(torch.zeros(5, 33))
    rms_norm(strided_copy(x), weight, 1e-5, other_residual, out=out)
    assert_exact(out, rms_norm(x, weight, 1e-5, residual))
    assert_exact(other_residual, residual)
    assert out._base.isnan().sum() == 5 * 5  # the poison around the rows is still there


def test_out_and_empty(isa: str) -> None:
    x, weight = torch.randn(5, 33), torch.randn(33)
    expected = rms_norm(x, weight, 1e-5)
    out = torch.full_like(x, float("nan"))
    assert rms_norm(x, weight, 1e-5, out=out) is out
    assert_exact(out, expected)
    assert rms_norm(x, weight, 1e-5, out=x) is x
    assert_exact(x, expected)
    assert rms_norm(x[:0], weight, 1e-5, x[:0]).shape == (0, 33)


def test_bad_input_is_named() -> None:
    arguments = {"x": torch.randn(4, 32), "weight": torch.randn(32), "residual": torch.randn(4, 32), "out": torch.randn(4, 32)}
    call = lambda **tensors: rms_norm(eps=1e-5, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_shape=["x"], first="x")
    for name, shape in [("weight", [31]), ("residual", [4, 31]), ("residual", [3, 32]), ("out", [4, 31])]:
        assert_refused(name, lambda: call(**(arguments | {name: torch.randn(shape)})))
