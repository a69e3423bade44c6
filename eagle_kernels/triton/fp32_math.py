"""exp and log in fp32 by the fixed operations of eagle_kernels/reference: where a decision hangs on them, every backend has the same bits."""

import triton
import triton.language as tl

from eagle_kernels.triton.common import fma


@triton.jit
def _step(series, x, coefficient: tl.constexpr):
    """series * x + coefficient, fused."""
    return fma(series, x, tl.full(x.shape, coefficient, tl.float32))


@triton.jit
def fp32_exp(x):
    """exp(x); 0 below -87.3, the value at 88.3 above it. As reference/fp32_math.py."""
    clamped = tl.maximum(tl.minimum(x, 88.3), -87.3)
    n = _step(clamped, tl.full(x.shape, 1.44269504, tl.float32), 12582912.0) - 12582912.0
    r = fma(n, tl.full(x.shape, -0.693359375, tl.float32), clamped)
    r = fma(n, tl.full(x.shape, 2.12194440e-4, tl.float32), r)
    series = _step(tl.full(x.shape, 0.0013934545, tl.float32), r, 0.008363777)
    series = _step(series, r, 0.041666456)
    series = _step(series, r, 0.16666573)
    series = _step(series, r, 0.5)
    y = fma(r * r, series, r) + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.3, 0.0, y * power)


@triton.jit
def split(x):
    """Exponent and mantissa: x = mantissa * 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)); positive normal numbers only."""
    shifted = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    mantissa = ((shifted & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    return (shifted >> 23).to(tl.float32), mantissa


@triton.jit
def log1p_scaled(t, exponent):
    """log((1 + t) * 2^exponent), t in [sqrt(1/2) - 1, sqrt(2) - 1]. As reference/gumbel_noise.py."""
    square = t * t
    series = _step(tl.full(t.shape, 0.07149754, tl.float32), t, -0.11571201)
    series = _step(series, t, 0.11661511)
    series = _step(series, t, -0.124110505)
    series = _step(series, t, 0.14249937)
    series = _step(series, t, -0.1666848)
    series = _step(series, t, 0.20000708)
    series = _step(series, t, -0.2499999)
    series = _step(series, t, 0.3333333)
    tail = fma(square * t, series, exponent * -2.12194440e-4)
    tail = fma(square, tl.full(t.shape, -0.5, tl.float32), tail)
    return fma(exponent, tl.full(t.shape, 0.693359375, tl.float32), t + tail)


@triton.jit
def fp32_log(x):
    """Natural log of a positive normal number."""
    exponent, mantissa = split(x)
    return log1p_scaled(mantissa - 1.0, exponent)
