"""Rows copied into a wider matrix: how a target hands over the states inside it."""

from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.checks import check_tensor


def copy_rows(x: Tensor, out: Tensor) -> None:
    """out[r] = x[r]; torch's own copy, as an op that a recording sees.

    x    [R, H], any dtype, last dimension contiguous
    out  as x, rows any distance apart, not overlapping x; modified
    """
    if x.is_cuda:
        check_tensor("x", x, (None, None), x.dtype, contiguous="last")
        check_tensor("out", out, x.shape, x.dtype, x.device, contiguous="last")
        out.copy_(x)
    else:
        OPS.copy_rows(x, out)
