"""Counter-based noise: Philox 4x32-10 words turned into Gumbel and uniform numbers, the same bits on every backend."""

import torch
from torch import Tensor

from eagle_kernels.reference.fp32_math import fma

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)

# Words below this give u' = (w + 0.5) / 2^32 < 1 - sqrt(1/2): there log1p(-u') is evaluated directly, so the far tail keeps full precision.
DIRECT_LOG1P_BELOW = 0x4AFB0CCC

# log1p(t) = t - t^2 / 2 + t^3 P(t) on [sqrt(1/2) - 1, sqrt(2) - 1]; P by least squares at 200 Chebyshev nodes, max relative error of the log 7.9e-8.
LOG1P_COEFFICIENTS = (0.3333333, -0.2499999, 0.20000708, -0.1666848, 0.14249937, -0.124110505, 0.11661511, -0.11571201, 0.07149754)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4


def philox_4x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).

    key      two int64 tensors holding uint32 values, broadcastable
    counter  four int64 tensors holding uint32 values, broadcastable
    returns  four int64 tensors holding uint32 values
    """
    key_0, key_1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high_0, low_0 = _multiply_32(c0, PHILOX_MULTIPLIERS[0])
        high_1, low_1 = _multiply_32(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0 = (key_0 + PHILOX_WEYL[0]) & MASK32
        key_1 = (key_1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def gumbel_noise(seeds: Tensor, positions: Tensor, num_tokens: int, *, stream: int = 0) -> Tensor:
    """Gumbel(0, 1) noise of every token id, a pure function of (seed, position, token id, stream).

    seeds      [R] int64
    positions  [R] int64, absolute position of the token to be drawn
    returns    [R, num_tokens] fp32

    noise[r, i] = -log(-log(1 - (w + 1/2) / 2^32)),  w = philox(seed; i / 4, position, stream)[i % 4]
    """
    words = _words(seeds, positions, (num_tokens + 3) // 4, stream)[:, :num_tokens]
    return -_log(_exponential(words))


def uniform_noise(seeds: Tensor, positions: Tensor, count: int, *, stream: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1), keyed as `gumbel_noise` is.

    seeds      [R] int64
    positions  [R] int64
    returns    [R, count] fp32, (w / 2^9 + 1/2) / 2^23
    """
    words = _words(seeds, positions, (count + 3) // 4, stream)[:, :count]
    return fma((words >> 9).float(), 2.0**-23, 2.0**-24)


def _words(seeds: Tensor, positions: Tensor, blocks: int, stream: int) -> Tensor:
    index = torch.arange(blocks, dtype=torch.int64, device=seeds.device)[None]
    key = (seeds[:, None] & MASK32, (seeds[:, None] >> 32) & MASK32)
    counter = (index, positions[:, None] & MASK32, (positions[:, None] >> 32) & MASK32, torch.full_like(index, stream))
    words = torch.stack(torch.broadcast_tensors(*philox_4x32(key, counter)), dim=-1)
    return words.reshape(seeds.shape[0], 4 * blocks)


def _multiply_32(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low halves of a 32 x 32 bit product, through partial products that fit int64."""
    low_partial = x * (multiplier & 0xFFFF)
    high_partial = x * (multiplier >> 16) + (low_partial >> 16)
    return high_partial >> 16, ((high_partial & 0xFFFF) << 16) | (low_partial & 0xFFFF)


def _exponential(words: Tensor) -> Tensor:
    """-log(1 - (w + 1/2) / 2^32) in fp32, accurate at both ends."""
    direct = words < DIRECT_LOG1P_BELOW
    small = -fma(words.float(), 2.0**-32, 2.0**-33)
    exponent, mantissa = _split(fma((MASK32 - words).float(), 2.0**-32, 2.0**-33))
    t = torch.where(direct, small, mantissa - 1.0)
    return -_log1p_scaled(t, torch.where(direct, torch.zeros_like(exponent), exponent))


def _log(x: Tensor) -> Tensor:
    exponent, mantissa = _split(x)
    return _log1p_scaled(mantissa - 1.0, exponent)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = mantissa * 2^exponent with the mantissa in [sqrt(1/2), sqrt(2)); positive normal numbers only."""
    shifted = x.view(torch.int32) - 0x3F3504F3
    mantissa = ((shifted & 0x7FFFFF) + 0x3F3504F3).view(torch.float32)
    return (shifted >> 23).float(), mantissa


def _log1p_scaled(t: Tensor, exponent: Tensor) -> Tensor:
    """log((1 + t) * 2^exponent)."""
    square = t * t
    series = torch.full_like(t, LOG1P_COEFFICIENTS[8])
    for coefficient in LOG1P_COEFFICIENTS[7::-1]:
        series = fma(series, t, coefficient)
    tail = fma(square * t, series, exponent * LN2_LOW)
    tail = fma(square, -0.5, tail)
    return fma(exponent, LN2_HIGH, t + tail)


__all__ = ["gumbel_noise", "philox_4x32", "uniform_noise"]
