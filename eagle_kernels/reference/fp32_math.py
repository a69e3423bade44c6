"""exp in fp32 by fixed operations, so that every backend gets the same bits where a decision hangs on them."""

import torch
from torch import Tensor

LOWEST, HIGHEST = -87.3, 88.3
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4

# exp(r) = 1 + r + r^2 P(r) on [-ln(2) / 2, ln(2) / 2]; P by least squares at 200 Chebyshev nodes, max relative error of exp 8.8e-8.
EXP_COEFFICIENTS = (0.5, 0.16666573, 0.041666456, 0.008363777, 0.0013934545)


def fp32_exp(x: Tensor) -> Tensor:
    """exp(x), fp32 to fp32; 0 below -87.3, the value at 88.3 above it.

    n = round(x / ln(2)), r = x - n ln(2) with ln(2) in two parts;  exp(x) = 2^n (1 + r + r^2 P(r))
    """
    clamped = x.clamp(LOWEST, HIGHEST)
    round_to_integer = torch.tensor(1.5 * 2.0**23)
    n = fma(clamped, LOG2_E, round_to_integer) - round_to_integer
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, clamped))
    series = torch.full_like(r, EXP_COEFFICIENTS[4])
    for coefficient in EXP_COEFFICIENTS[3::-1]:
        series = fma(series, r, coefficient)
    y = fma(r * r, series, r) + 1.0
    return torch.where(x < torch.tensor(LOWEST), 0.0, torch.ldexp(y, n))


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Fused multiply-add of fp32 numbers through fp64: the product is exact there, so only the last of two roundings could differ, by chance 2^-29."""
    b, c = (torch.as_tensor(value, dtype=torch.float32).double() for value in (b, c))
    return (a.double() * b + c).float()
