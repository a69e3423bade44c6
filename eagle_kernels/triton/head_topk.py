"""head_topk and logits_topk on CUDA: the head's logits stay in registers, and only the best of each tile are written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.head_topk import HEAD_TILE, LOGITS_TILE
from eagle_kernels.triton.common import AotCase
from eagle_kernels.triton.tile_product import BLOCK_K, BLOCK_M, tile_product

DTYPES = (torch.bfloat16, torch.float16)
MAX_TOP_K = 64
# Three stages of 32 kB: two programs on an SM of 227 kB, so that one selects while the other loads; fits the 99 kB of sm_86, 89 and 120.
# Without maxnreg ptxas settles for 128 registers on sm_80 and spills 8 bytes; Triton 3.6 needs 232 there. Shared memory allows two programs on an SM in any case.
HEAD_OPTIONS = {"num_warps": 4, "num_stages": 3, "maxnreg": 232, "enable_fp_fusion": False}
LOGITS_CONSTANTS = {"ROWS": 1, "BLOCK": LOGITS_TILE}
LOGITS_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def _head_constants(depth: int) -> dict:
    return {"EVEN_K": depth % BLOCK_K == 0, "BLOCK_M": BLOCK_M, "BLOCK_N": HEAD_TILE, "BLOCK_K": BLOCK_K}


@triton.jit
def _write_topk(logits, rows, columns, num_rows, vocab_size, tile, num_tiles, top_k, keys_ptr, max_ptr, sum_exp_ptr):
    """Keys and statistics of a tile of logits [ROWS, BLOCK]: top_k rounds of arg-max, in 32 bits each for the logit and the id, which costs less than a 64-bit key."""
    lowest: tl.constexpr = -2147483648  # below ordered(-inf)
    inside = (columns < vocab_size)[None, :]
    clean = tl.where(inside & (logits > -float("inf")), logits, -float("inf"))
    greatest = tl.max(clean, 1)
    finite = (greatest > -float("inf")) & (greatest < float("inf"))
    # exp(-inf - 0) is 0, so a tile without any value needs no case of its own.
    sum_exp = tl.sum(tl.exp(clean - tl.where(finite, greatest, 0.0)[:, None]), 1)
    sum_exp = tl.where(greatest == float("inf"), 1.0, sum_exp)
    place = rows.to(tl.int64) * num_tiles + tile
    kept = rows < num_rows
    tl.store(max_ptr + place, greatest, mask=kept)
    tl.store(sum_exp_ptr + place, sum_exp, mask=kept)

    bits = (clean + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), lowest)
    for i in range(top_k):
        best = tl.max(ordered, 1)
        best_id = tl.min(tl.where(ordered == best[:, None], columns[None, :], 0x7FFFFFFF), 1)
        key = (best.to(tl.int64) << 32) | (0xFFFFFFFF - best_id.to(tl.int64))
        key = tl.where(best > lowest, key, -9223372036854775808)
        tl.store(keys_ptr + place * top_k + i, key, mask=kept)
        ordered = tl.where(columns[None, :] == best_id[:, None], lowest, ordered)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "top_k", "vocab_size"])
def _head_topk_kernel(
    features_ptr,  # [num_rows, depth], row stride stride_x
    weight_ptr,  # [vocab_size, depth] contiguous
    keys_ptr,  # [num_rows, num_tiles, top_k] int64
    max_ptr,  # [num_rows, num_tiles] fp32
    sum_exp_ptr,  # [num_rows, num_tiles] fp32
    num_rows,
    vocab_size,
    depth,
    stride_x,
    num_tiles,
    top_k,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N tokens of BLOCK_M rows. Grid (tiles of rows, tiles of the vocabulary), as in `linear`."""
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    logits = tile_product(features_ptr, weight_ptr, num_rows, vocab_size, depth, stride_x, rows, columns, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
    _write_topk(logits, rows, columns, num_rows, vocab_size, tile, num_tiles, top_k, keys_ptr, max_ptr, sum_exp_ptr)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "top_k"])
def _logits_topk_kernel(
    logits_ptr,  # [num_rows, vocab_size] fp32, row stride stride_x
    keys_ptr,  # [num_rows, num_tiles, top_k] int64
    max_ptr,  # [num_rows, num_tiles] fp32
    sum_exp_ptr,  # [num_rows, num_tiles] fp32
    num_rows,
    vocab_size,
    stride_x,
    num_tiles,
    top_k,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK tokens of ROWS rows. Grid (tiles of the vocabulary, blocks of rows)."""
    tile = tl.program_id(0)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < num_rows)[:, None] & (columns < vocab_size)[None, :]
    logits = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * stride_x + columns[None, :], mask=inside, other=-float("inf"))
    _write_topk(logits, rows, columns, num_rows, vocab_size, tile, num_tiles, top_k, keys_ptr, max_ptr, sum_exp_ptr)


def _check_result(rows: int, tiles: int, vocab_size: int, keys: Tensor, max: Tensor, sum_exp: Tensor, device: torch.device) -> None:
    refuse(vocab_size < 1, "out_features", "a vocabulary of 1 or more", vocab_size)
    check_tensor("keys", keys, (rows, tiles, None), torch.int64, device)
    refuse(not 1 <= keys.shape[2] <= MAX_TOP_K, "top_k", f"1 to {MAX_TOP_K}", keys.shape[2])
    check_tensor("max", max, (rows, tiles), torch.float32, device)
    check_tensor("sum_exp", sum_exp, (rows, tiles), torch.float32, device)


def head_topk(features: Tensor, weight: Tensor, out_features: int, keys: Tensor, max: Tensor, sum_exp: Tensor) -> None:
    """The op eagle_kernels::head_topk on CUDA.

    features      [R, H] bf16 or fp16, last dimension contiguous
    weight        [V, H] in the dtype of features
    keys          [R, tiles, top_k] int64, tiles of 64 tokens; modified
    max, sum_exp  [R, tiles] fp32; modified
    """
    check_tensor("features", features, (None, None), DTYPES, contiguous="last")
    rows, depth = features.shape
    check_tensor("weight", weight, (out_features, depth), features.dtype, features.device)
    tiles = triton.cdiv(out_features, HEAD_TILE)
    _check_result(rows, tiles, out_features, keys, max, sum_exp, features.device)
    if rows > 0:
        grid = (triton.cdiv(rows, BLOCK_M), tiles)
        _head_topk_kernel[grid](features, weight, keys, max, sum_exp, rows, out_features, depth, features.stride(0), tiles, keys.shape[2], **_head_constants(depth), **HEAD_OPTIONS)


def logits_topk(logits: Tensor, keys: Tensor, max: Tensor, sum_exp: Tensor) -> None:
    """The op eagle_kernels::logits_topk on CUDA.

    logits        [R, V] fp32, last dimension contiguous
    keys          [R, tiles, top_k] int64, tiles of 1024 tokens; modified
    max, sum_exp  [R, tiles] fp32; modified
    """
    check_tensor("logits", logits, (None, None), torch.float32, contiguous="last")
    rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, LOGITS_TILE)
    _check_result(rows, tiles, vocab_size, keys, max, sum_exp, logits.device)
    if rows > 0:
        _logits_topk_kernel[(tiles, rows)](logits, keys, max, sum_exp, rows, vocab_size, logits.stride(0), tiles, keys.shape[2], **LOGITS_CONSTANTS, **LOGITS_OPTIONS)


def aot_cases() -> list[AotCase]:
    """Every configuration that the two launchers can choose."""
    cases = []
    result = {"keys_ptr": "*i64", "max_ptr": "*fp32", "sum_exp_ptr": "*fp32"}
    for dtype in ("bf16", "fp16"):
        for even in (True, False):
            constants = _head_constants(BLOCK_K if even else 1)
            signature = {"features_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}"} | result | {"num_rows": "i32", "vocab_size": "i32", "depth": "i32", "stride_x": "i64"}
            signature |= {"num_tiles": "i32", "top_k": "i32"} | dict.fromkeys(constants, "constexpr")
            aligned = ("features_ptr", "weight_ptr", *result, "depth", "stride_x")
            cases.append(AotCase(f"head_topk-{dtype}" + ("" if even else "-tail"), _head_topk_kernel, signature, constants, aligned, HEAD_OPTIONS, mma="mma"))
    signature = {"logits_ptr": "*fp32"} | result | {"num_rows": "i32", "vocab_size": "i32", "stride_x": "i64", "num_tiles": "i32", "top_k": "i32"}
    signature |= dict.fromkeys(LOGITS_CONSTANTS, "constexpr")
    cases.append(AotCase("logits_topk", _logits_topk_kernel, signature, LOGITS_CONSTANTS, ("logits_ptr", *result, "vocab_size", "stride_x"), LOGITS_OPTIONS, small=True))
    return cases
