"""silu_mul against its reference."""

import pytest
import torch
from eagle_kernels import reference, silu_mul
from helpers import assert_bad_tensors_refused, assert_close_fp32, assert_exact, strided_copy


@pytest.mark.parametrize("size", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("intermediate_size", [1, 7, 8, 31, 100, 1536])
def test_matches_reference(intermediate_size: int, size: float, isa: str) -> None:
    gate_up = torch.randn(2, 3, 2 * intermediate_size) * size
    y = silu_mul(gate_up)
    assert_close_fp32(y, reference.silu_mul(gate_up.double()), reference.silu_mul(gate_up))


def test_every_gate(isa: str) -> None:
    """Over the whole range of exp, also where it overflows or vanishes."""
    gate = torch.linspace(-120, 120, 9601)
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    assert_close_fp32(silu_mul(gate_up), reference.silu_mul(gate_up.double()), reference.silu_mul(gate_up))
    small = gate.abs() < 10
    relative = (silu_mul(gate_up)[0].double() / reference.silu_mul(gate_up.double())[0] - 1).abs()[small]
    assert relative.nan_to_num(0).max() < 1e-6  # 0 / 0 at gate 0


def test_special_values(isa: str) -> None:
    gate = torch.tensor([0.0, -0.0, torch.inf, -1e4, 1e30, torch.nan, 1.0, -1e30, -torch.inf, -100.0])
    up = torch.tensor([5.0, 5.0, 2.0, 1.0, 1.0, 1.0, torch.nan, 1e30, 1.0, 1e30])
    y = silu_mul(torch.cat((gate, up)))
    assert_exact(y[:2].abs(), torch.zeros(2))
    assert y[2] == torch.inf and y[3].abs() < 1e-30 and y[4] == 1e30 and y[5:7].isnan().all()
    assert_exact(y[7:].abs(), torch.zeros(3))  # exp is clamped at 88.3: what it leaves must not show


def test_strided_out_and_empty(isa: str) -> None:
    gate_up = torch.randn(4, 2, 34)
    expected = silu_mul(gate_up)
    assert_exact(silu_mul(strided_copy(gate_up)), expected)
    out = torch.full((4, 2, 17), float("nan"))
    assert silu_mul(gate_up, out=out) is out
    assert_exact(out, expected)
    assert silu_mul(gate_up[:0]).shape == (0, 2, 17)


def test_bad_input_is_named() -> None:
    arguments = {"gate_up": torch.randn(4, 32), "out": torch.randn(4, 16)}
    assert_bad_tensors_refused(silu_mul, arguments, list(arguments), any_shape=["gate_up"], first="gate_up")
    with pytest.raises(ValueError, match="^gate_up: expected"):
        silu_mul(torch.randn(4, 33))
    with pytest.raises(ValueError, match="^out: expected"):
        silu_mul(torch.randn(4, 32), out=torch.randn(4, 32))
