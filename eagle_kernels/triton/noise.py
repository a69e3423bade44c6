"""Counter-based noise on CUDA: Philox 4x32-10 (Salmon et al., SC 2011) and the numbers made of its words, with the bits of eagle_kernels/reference/gumbel_noise.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor
from eagle_kernels.triton.common import AotCase, fma
from eagle_kernels.triton.fp32_math import fp32_log, log1p_scaled, split

CONSTANTS = {"BLOCK": 1024}
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit
def philox(seed, position, stream, index):
    """The four words uint32 of each index uint32. seed and position are int64, stream int32, one each."""
    c0 = index
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + (position >> 32).to(tl.uint32)
    c3 = tl.zeros_like(c0) + stream
    key_0 = tl.zeros_like(c0) + seed.to(tl.uint32)
    key_1 = tl.zeros_like(c0) + (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        high_1 = tl.umulhi(c2, tl.full(c0.shape, 0xCD9E8D57, tl.uint32))
        low_0 = c0 * 0xD2511F53
        low_1 = c2 * 0xCD9E8D57
        c0 = high_1 ^ c1 ^ key_0
        c2 = high_0 ^ c3 ^ key_1
        c1 = low_1
        c3 = low_0
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise_words(seed, position, stream, first, BLOCK: tl.constexpr):
    """Words uint32 [BLOCK] of the tokens first, first + 1, ...; first is a multiple of 4."""
    w0, w1, w2, w3 = philox(seed, position, stream, (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32))
    # Token 4 i + j has word j of index i: [i, j // 2, j % 2].
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@triton.jit
def token_words(seed, position, stream, tokens):
    """The words of any tokens int32, at four times the price of noise_words."""
    w0, w1, w2, w3 = philox(seed, position, stream, (tokens >> 2).to(tl.uint32))
    j = tokens & 3
    return tl.where(j < 2, tl.where(j == 0, w0, w1), tl.where(j == 2, w2, w3))


@triton.jit
def gumbel_of(word):
    """-log(-log(1 - (word + 1/2) / 2^32)), accurate at both ends."""
    scale = tl.full(word.shape, 2.3283064365386963e-10, tl.float32)  # 2^-32
    half = tl.full(word.shape, 1.1641532182693481e-10, tl.float32)  # 2^-33
    exponent, mantissa = split(fma((0xFFFFFFFF - word).to(tl.float32), scale, half))
    direct = word < 0x4AFB0CCC  # there log1p is evaluated directly, so that the far tail keeps full precision
    t = tl.where(direct, -fma(word.to(tl.float32), scale, half), mantissa - 1.0)
    return -fp32_log(-log1p_scaled(t, tl.where(direct, 0.0, exponent)))


@triton.jit
def uniform_of(word):
    """(word / 2^9 + 1/2) / 2^23, in the open interval (0, 1)."""
    return fma((word >> 9).to(tl.float32), tl.full(word.shape, 1.1920928955078125e-07, tl.float32), tl.full(word.shape, 5.9604644775390625e-08, tl.float32))


@triton.jit(do_not_specialize=["stream", "uniform"])
def _noise_kernel(
    seeds_ptr,  # [rows] int64
    positions_ptr,  # [rows] int64
    out_ptr,  # [rows, count] fp32
    stream,
    uniform,
    count,
    BLOCK: tl.constexpr,
):
    """BLOCK numbers of one row. Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    words = noise_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), stream, first, BLOCK)
    i = first + tl.arange(0, BLOCK)
    if uniform != 0:
        tl.store(out_ptr + row * count + i, uniform_of(words), mask=i < count)
    else:
        tl.store(out_ptr + row * count + i, gumbel_of(words), mask=i < count)


def noise(seeds: Tensor, positions: Tensor, stream: int, uniform: bool, out: Tensor) -> None:
    """The op eagle_kernels::noise on CUDA.

    seeds, positions  [R] int64
    out               [R, count] fp32; modified
    """
    check_tensor("seeds", seeds, (None,), torch.int64)
    rows = seeds.shape[0]
    check_tensor("positions", positions, (rows,), torch.int64, seeds.device)
    check_tensor("out", out, (rows, None), torch.float32, seeds.device)
    if out.numel() > 0:
        _noise_kernel[(rows, triton.cdiv(out.shape[1], CONSTANTS["BLOCK"]))](seeds, positions, out, stream, int(uniform), out.shape[1], **CONSTANTS, **OPTIONS)


def aot_cases() -> list[AotCase]:
    """Every configuration that `noise` can launch."""
    signature = {"seeds_ptr": "*i64", "positions_ptr": "*i64", "out_ptr": "*fp32", "stream": "i32", "uniform": "i32", "count": "i32", "BLOCK": "constexpr"}
    return [AotCase("noise", _noise_kernel, signature, CONSTANTS, ("seeds_ptr", "positions_ptr", "out_ptr", "count"), OPTIONS, wide_loads=False, small=True)]
