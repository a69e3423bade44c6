"""fp32 to the dtype of a result."""

import triton
import triton.language as tl

from eagle_kernels.triton.common import INTERPRET


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 to dtype, to nearest even. The interpreter cuts the low half of the bits off when it makes bf16 of fp32, so there they are rounded away first."""
    if INTERPRET:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + (((bits >> 16) & 1) + 0x7FFF)) & -65536
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
