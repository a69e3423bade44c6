"""rms_norm on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton.common import AotCase, in_both_dtypes, to_float
from eagle_kernels.triton.rounding import round_to

DTYPES = (torch.bfloat16, torch.float16)

# size of a row -> (BLOCK, num_warps): heads take a warp each, so that their reductions need no barrier; 8 warps hold a row of 4096 in 16 registers per thread. Longer rows
# go through in blocks and are read twice, the second time from the cache.
ROW_CONFIGS = ((256, 256, 1), (None, 4096, 8))


def _config(size: int, residual: bool) -> tuple[dict, dict]:
    block, warps = next((block, warps) for limit, block, warps in ROW_CONFIGS if limit is None or size <= limit)
    constants = {"HAS_RESIDUAL": residual, "ONE_BLOCK": size <= block, "BLOCK": block}
    return constants, {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit
def _hidden(x_ptr, residual_ptr, i, mask, HAS_RESIDUAL: tl.constexpr):
    """h in fp32. With a residual it is the sum as it is kept, that is rounded, and the sum is written."""
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = round_to(to_float(tl.load(residual_ptr + i, mask=mask, other=0.0)) + to_float(x), residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + i, x, mask=mask)
    return to_float(x)


@triton.jit(do_not_specialize=["inner"])
def _rms_norm_kernel(
    x_ptr,  # [outer, inner, size], strides below, last dimension contiguous
    weight_ptr,  # [size] fp32
    residual_ptr,  # [outer, inner, size] contiguous, or anything
    out_ptr,  # [outer, inner, size], strides below
    stride_xo,
    stride_xi,
    stride_oo,
    stride_oi,
    inner,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # size <= BLOCK
    BLOCK: tl.constexpr,
):
    """One program per row. Grid (outer * inner)."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // inner * stride_xo + row % inner * stride_xi
    out_ptr += row // inner * stride_oo + row % inner * stride_oi
    residual_ptr += row * size
    lane = tl.arange(0, BLOCK)
    if ONE_BLOCK:
        mask = lane < size
        h = _hidden(x_ptr, residual_ptr, lane, mask, HAS_RESIDUAL)
        inverse = 1.0 / tl.sqrt(tl.sum(h * h, 0) / size + eps)
        weight = tl.load(weight_ptr + lane, mask=mask, other=0.0)
        tl.store(out_ptr + lane, round_to(h * inverse * weight, out_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            i = start + lane
            h = _hidden(x_ptr, residual_ptr, i, i < size, HAS_RESIDUAL)
            squares += h * h
        inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / size + eps)
        if HAS_RESIDUAL:
            tl.debug_barrier()  # the sums just written are read below
        for start in range(0, size, BLOCK):
            i = start + lane
            mask = i < size
            if HAS_RESIDUAL:
                h = to_float(tl.load(residual_ptr + i, mask=mask, other=0.0))
            else:
                h = to_float(tl.load(x_ptr + i, mask=mask, other=0.0))
            weight = tl.load(weight_ptr + i, mask=mask, other=0.0)
            tl.store(out_ptr + i, round_to(h * inverse * weight, out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor) -> None:
    """The op eagle_kernels::rms_norm on CUDA.

    x         [R, H] or [R, heads, H] bf16 or fp16, last dimension contiguous
    weight    [H] fp32
    residual  as x, contiguous, or None; modified: residual += x, rounded; the norm is that of the rounded sum
    out       as x, last dimension contiguous; modified
    """
    refuse(x.dim() not in (2, 3), "x", "2 or 3 dimensions", x.dim())
    check_tensor("x", x, (None,) * x.dim(), DTYPES, contiguous="last")
    check_tensor("weight", weight, x.shape[-1:], torch.float32, x.device)
    if residual is not None:
        check_tensor("residual", residual, x.shape, x.dtype, x.device)
    check_tensor("out", out, x.shape, x.dtype, x.device, contiguous="last")
    if x.numel() == 0:
        return
    size = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    strides = [stride for t in (x, out) for stride in (t.stride(0), t.stride(1) if t.dim() == 3 else 0)]
    constants, options = _config(size, residual is not None)
    _rms_norm_kernel[(x.shape[0] * inner,)](x, weight, x if residual is None else residual, out, *strides, inner, size, eps, **constants, **options)


def aot_cases() -> list[AotCase]:
    """Every configuration that `rms_norm` can launch."""
    cases = []
    for size in (256, 4096, 5120):
        for residual in (False, True):
            constants, options = _config(size, residual)
            signature = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "residual_ptr": "*bf16", "out_ptr": "*bf16"}
            signature |= dict.fromkeys(("stride_xo", "stride_xi", "stride_oo", "stride_oi"), "i64") | {"inner": "i32", "size": "i32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
            aligned = ("x_ptr", "weight_ptr", "residual_ptr", "out_ptr", "stride_xo", "stride_xi", "stride_oo", "stride_oi", "size")
            cases.append(AotCase(f"rms_norm-{size}" + ("-residual" if residual else ""), _rms_norm_kernel, signature, constants, aligned, options, small=True))
    return in_both_dtypes(cases)
