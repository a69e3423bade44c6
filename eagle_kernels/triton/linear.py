"""linear in deterministic mode, embedding and expert_linear on CUDA, where a packed weight is the plain [N, K] matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor
from eagle_kernels.triton.common import AotCase, fma, in_both_dtypes, to_float
from eagle_kernels.triton.rounding import round_to
from eagle_kernels.triton.tile_product import BLOCK_K, BLOCK_M, tile_product

DTYPES = (torch.bfloat16, torch.float16)

# 32 outputs per program: 128 programs for 4096 outputs, about one per SM. Four stages keep 3 x 8 kB of weights per program in flight and fit two programs on an SM of 227 kB.
BLOCK_N = 32
LINEAR_OPTIONS = {"num_warps": 4, "num_stages": 4, "maxnreg": 128, "enable_fp_fusion": False}

EMBEDDING_CONSTANTS = {"BLOCK": 1024}
EMBEDDING_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}

# A row times 16 outputs of its expert; every thread has 32 sums.
EXPERT_CONSTANTS = {"BLOCK_N": 16, "BLOCK_K": 256}
EXPERT_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


def _linear_constants(depth: int, bias: bool) -> dict:
    return {"EVEN_K": depth % BLOCK_K == 0, "HAS_BIAS": bias, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,  # [num_rows, depth], row stride stride_x
    weight_ptr,  # [out_features, depth] contiguous
    bias_ptr,  # [out_features], or anything
    out_ptr,  # [num_rows, out_features], row stride stride_out
    num_rows,
    out_features,
    depth,
    stride_x,
    stride_out,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the output. Grid (tiles of rows, tiles of outputs): the tiles of rows that read the same weights run together, so that W leaves the memory once."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tile_product(x_ptr, weight_ptr, num_rows, out_features, depth, stride_x, rows, columns, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        acc += to_float(tl.load(bias_ptr + columns, mask=columns < out_features, other=0.0))[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & (columns < out_features)[None, :])


@triton.jit(do_not_specialize=["num_ids"])
def _embedding_kernel(
    ids_ptr,  # [rows] int64
    weight_ptr,  # [num_ids, size] contiguous
    out_ptr,  # [rows, size] contiguous
    num_ids,
    size,
    BLOCK: tl.constexpr,
):
    """Copies BLOCK numbers of one row. Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), num_ids - 1)
    tl.store(out_ptr + row * size + i, tl.load(weight_ptr + token * size + i, mask=i < size), mask=i < size)


@triton.jit(do_not_specialize=["num_experts"])
def _expert_linear_kernel(
    x_ptr,  # [rows, depth], row stride stride_x
    weight_ptr,  # [num_experts, out_features, depth] contiguous
    expert_ids_ptr,  # [rows] int32
    out_ptr,  # [rows, out_features], row stride stride_out
    num_experts,
    out_features,
    depth,
    stride_x,
    stride_out,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of one row: BLOCK_K chains over ascending k, then one tree. Grid (rows, blocks of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    expert = tl.load(expert_ids_ptr + row).to(tl.int64)
    # A row without an expert reads nothing and gives zeros.
    depth_of_row = tl.where((expert >= 0) & (expert < num_experts), depth, 0)
    x_ptr += row * stride_x
    weight_ptrs = weight_ptr + (expert * out_features + tl.minimum(columns, out_features - 1))[:, None] * depth + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, depth_of_row, BLOCK_K):
        inside = (k < depth - start)[None, :]
        x = to_float(tl.load(x_ptr + start + k[None, :], mask=inside, other=0.0))
        weight = to_float(tl.load(weight_ptrs + start, mask=inside, other=0.0))
        acc = fma(weight, tl.broadcast_to(x, (BLOCK_N, BLOCK_K)), acc)
    tl.store(out_ptr + row * stride_out + columns, round_to(tl.sum(acc, 1), out_ptr.dtype.element_ty), mask=columns < out_features)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, out: Tensor) -> None:
    """The op eagle_kernels::linear on CUDA, row-invariant: one tile and one order of k for any number of rows, no split.

    x       [M, K] bf16 or fp16, last dimension contiguous
    weight  [N, K] in the dtype of x
    bias    [N] in the dtype of x, or None
    out     [M, N] in the dtype of x, or fp32; last dimension contiguous; modified
    """
    check_tensor("x", x, (None, None), DTYPES, contiguous="last")
    num_rows, depth = x.shape
    check_tensor("weight", weight, (out_features, depth), x.dtype, x.device)
    if bias is not None:
        check_tensor("bias", bias, (out_features,), x.dtype, x.device)
    check_tensor("out", out, (num_rows, out_features), (x.dtype, torch.float32), x.device, contiguous="last")
    if out.numel() == 0:
        return
    grid = (triton.cdiv(num_rows, BLOCK_M), triton.cdiv(out_features, BLOCK_N))
    constants = _linear_constants(depth, bias is not None)
    _linear_kernel[grid](x, weight, x if bias is None else bias, out, num_rows, out_features, depth, x.stride(0), out.stride(0), **constants, **LINEAR_OPTIONS)


def embedding(ids: Tensor, weight: Tensor, out_features: int, out: Tensor) -> None:
    """The op eagle_kernels::embedding on CUDA.

    ids     [R] int64; ids below 0 read row 0, ids past the end the last row (a value cannot be refused without a synchronisation)
    weight  [N, K] bf16 or fp16
    out     [R, K] in the dtype of weight; modified
    """
    check_tensor("ids", ids, (None,), torch.int64)
    check_tensor("weight", weight, (out_features, None), DTYPES, ids.device)
    check_tensor("out", out, (ids.shape[0], weight.shape[1]), weight.dtype, ids.device)
    if out.numel() > 0:
        grid = (out.shape[0], triton.cdiv(out.shape[1], EMBEDDING_CONSTANTS["BLOCK"]))
        _embedding_kernel[grid](ids, weight, out, out_features, out.shape[1], **EMBEDDING_CONSTANTS, **EMBEDDING_OPTIONS)


def expert_linear(x: Tensor, weight: Tensor, expert_ids: Tensor, out_features: int, out: Tensor) -> None:
    """The op eagle_kernels::expert_linear on CUDA, row-invariant.

    x           [M, K] bf16 or fp16, last dimension contiguous
    weight      [experts, N, K] in the dtype of x
    expert_ids  [M] int32; a row whose id is outside [0, experts) gives zeros
    out         [M, N] in the dtype of x, or fp32; last dimension contiguous; modified
    """
    check_tensor("x", x, (None, None), DTYPES, contiguous="last")
    num_rows, depth = x.shape
    check_tensor("weight", weight, (None, out_features, depth), x.dtype, x.device)
    check_tensor("expert_ids", expert_ids, (num_rows,), torch.int32, x.device)
    check_tensor("out", out, (num_rows, out_features), (x.dtype, torch.float32), x.device, contiguous="last")
    if out.numel() == 0:
        return
    grid = (num_rows, triton.cdiv(out_features, EXPERT_CONSTANTS["BLOCK_N"]))
    _expert_linear_kernel[grid](x, weight, expert_ids, out, weight.shape[0], out_features, depth, x.stride(0), out.stride(0), **EXPERT_CONSTANTS, **EXPERT_OPTIONS)


def aot_cases() -> list[AotCase]:
    """Every configuration that the three launchers can choose."""
    cases = []
    for dtype in ("bf16", "fp16"):
        for even in (True, False):
            for bias in (False, True):
                for out in (dtype,) if bias else (dtype, "fp32"):
                    constants = _linear_constants(BLOCK_K if even else 1, bias)
                    signature = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "bias_ptr": f"*{dtype}", "out_ptr": f"*{out}"}
                    signature |= {"num_rows": "i32", "out_features": "i32", "depth": "i32", "stride_x": "i64", "stride_out": "i64"} | dict.fromkeys(constants, "constexpr")
                    aligned = ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr", "out_features", "depth", "stride_x", "stride_out")
                    name = f"linear-{dtype}" + ("" if even else "-tail") + ("-bias" if bias else "") + ("-fp32" if out == "fp32" else "")
                    cases.append(AotCase(name, _linear_kernel, signature, constants, aligned, LINEAR_OPTIONS, mma="mma"))
    signature = {"ids_ptr": "*i64", "weight_ptr": "*bf16", "out_ptr": "*bf16", "num_ids": "i32", "size": "i32", "BLOCK": "constexpr"}
    others = [AotCase("embedding", _embedding_kernel, signature, EMBEDDING_CONSTANTS, ("ids_ptr", "weight_ptr", "out_ptr", "size"), EMBEDDING_OPTIONS, small=True)]
    signature = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "expert_ids_ptr": "*i32", "out_ptr": "*bf16", "num_experts": "i32", "out_features": "i32", "depth": "i32", "stride_x": "i64", "stride_out": "i64"}
    aligned = ("x_ptr", "weight_ptr", "expert_ids_ptr", "out_ptr", "out_features", "depth", "stride_x", "stride_out")
    others.append(AotCase("expert_linear", _expert_linear_kernel, signature | dict.fromkeys(EXPERT_CONSTANTS, "constexpr"), EXPERT_CONSTANTS, aligned, EXPERT_OPTIONS, small=True))
    return cases + in_both_dtypes(others)
