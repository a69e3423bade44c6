"""silu_mul on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton.common import AotCase, in_both_dtypes, to_float
from eagle_kernels.triton.rounding import round_to

DTYPES = (torch.bfloat16, torch.float16)
CONSTANTS = {"BLOCK": 1024}  # 8 numbers, 16 bytes, per thread
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [rows, 2 * size]: gate, then up
    out_ptr,  # [rows, size]
    stride_x,
    stride_o,
    size,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK outputs. Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    gate_ptr = gate_up_ptr + row * stride_x
    gate = to_float(tl.load(gate_ptr + i, mask=mask, other=0.0))
    up = to_float(tl.load(gate_ptr + size + i, mask=mask, other=0.0))
    # exp of a very negative gate overflows, and the quotient is 0, as it should be.
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * stride_o + i, round_to(y, out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """The op eagle_kernels::silu_mul on CUDA.

    gate_up  [R, 2 I] bf16 or fp16, last dimension contiguous
    out      [R, I] in the dtype of gate_up, last dimension contiguous; modified
    """
    check_tensor("gate_up", gate_up, (None, None), DTYPES, contiguous="last")
    refuse(gate_up.shape[1] % 2 != 0, "gate_up", "an even last dimension (gate, then up)", gate_up.shape[1])
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    check_tensor("out", out, (rows, size), gate_up.dtype, gate_up.device, contiguous="last")
    if out.numel() > 0:
        _silu_mul_kernel[(rows, triton.cdiv(size, CONSTANTS["BLOCK"]))](gate_up, out, gate_up.stride(0), out.stride(0), size, **CONSTANTS, **OPTIONS)


def aot_cases() -> list[AotCase]:
    """Every configuration that `silu_mul` can launch."""
    signature = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", "stride_x": "i64", "stride_o": "i64", "size": "i32", "BLOCK": "constexpr"}
    return in_both_dtypes([AotCase("silu_mul", _silu_mul_kernel, signature, CONSTANTS, tuple(signature)[:5], OPTIONS, small=True)])
