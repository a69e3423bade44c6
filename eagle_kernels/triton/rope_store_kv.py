"""rope_store_kv on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton.common import AotCase, in_both_dtypes, to_float
from eagle_kernels.triton.rounding import round_to

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 512
HALF_BLOCKS = (32, 64, 128, 256)
HEADS_OF_A_PROGRAM = 8


def _config(head_dim: int) -> tuple[dict, dict]:
    block = max(HALF_BLOCKS[0], triton.next_power_of_2(head_dim // 2))
    return {"HEADS": HEADS_OF_A_PROGRAM, "BLOCK": block}, {"num_warps": min(block // 32, 4), "num_stages": 1, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["kv_heads", "max_pages", "max_positions", "num_pages", "num_queries", "page_size", "q_heads", "row_offset"])
def _rope_store_kv_kernel(
    q_ptr,  # [B, Q, q_heads, head_dim], strides below; rotated in place
    k_ptr,  # [B, Q, kv_heads, head_dim], strides below
    v_ptr,  # as k
    position_ids_ptr,  # [B, Q] int64
    rope_table_ptr,  # [max_positions, head_dim] fp32: cos of the half, then sin
    kv_ptr,  # [2, pages, page_size, kv_heads, head_dim] contiguous
    page_table_ptr,  # [B, max_pages] int32
    seq_lens_ptr,  # [B] int32
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_plane,  # of kv_ptr, from keys to values
    num_queries,
    q_heads,
    kv_heads,
    head_dim,
    max_positions,
    num_pages,
    page_size,
    max_pages,
    row_offset,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least head_dim / 2
):
    """HEADS heads of one token: first the programs of q, then those of k and v. Grid (B * Q, blocks of q heads + blocks of kv heads)."""
    token = tl.program_id(0)
    b = (token // num_queries).to(tl.int64)
    n = (token % num_queries).to(tl.int64)
    q_blocks = tl.cdiv(q_heads, HEADS)
    block = tl.program_id(1)
    half = head_dim // 2
    j = tl.arange(0, BLOCK)
    # Padding rows may carry any position; they must not read outside the table.
    position = tl.load(position_ids_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), max_positions - 1)
    cosine = tl.load(rope_table_ptr + position * head_dim + j, mask=j < half, other=0.0)[None, :]
    sine = tl.load(rope_table_ptr + position * head_dim + half + j, mask=j < half, other=0.0)[None, :]
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        mask = (head < q_heads)[:, None] & (j < half)[None, :]
        pointers = q_ptr + b * stride_qb + n * stride_qn + head.to(tl.int64)[:, None] * stride_qh + j[None, :]
        low = to_float(tl.load(pointers, mask=mask, other=0.0))
        high = to_float(tl.load(pointers + half, mask=mask, other=0.0))
        tl.store(pointers, round_to(low * cosine - high * sine, q_ptr.dtype.element_ty), mask=mask)
        tl.store(pointers + half, round_to(high * cosine + low * sine, q_ptr.dtype.element_ty), mask=mask)
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        row = tl.load(seq_lens_ptr + b) + row_offset + n
        entry = row // page_size
        page = tl.load(page_table_ptr + b * max_pages + entry, mask=(row >= 0) & (entry < max_pages), other=-1).to(tl.int64)
        # Rows of inactive or padded sequences may have no page: they are not stored.
        heads_stored = tl.where((row >= 0) & (page >= 0) & (page < num_pages), kv_heads, 0)
        mask = (head < heads_stored)[:, None] & (j < half)[None, :]
        slot = page * page_size + row % page_size
        target = kv_ptr + (slot * kv_heads + head.to(tl.int64)[:, None]) * head_dim + j[None, :]
        pointers = k_ptr + b * stride_kb + n * stride_kn + head.to(tl.int64)[:, None] * stride_kh + j[None, :]
        low = to_float(tl.load(pointers, mask=mask, other=0.0))
        high = to_float(tl.load(pointers + half, mask=mask, other=0.0))
        tl.store(target, round_to(low * cosine - high * sine, kv_ptr.dtype.element_ty), mask=mask)
        tl.store(target + half, round_to(high * cosine + low * sine, kv_ptr.dtype.element_ty), mask=mask)
        target += stride_plane
        pointers = v_ptr + b * stride_vb + n * stride_vn + head.to(tl.int64)[:, None] * stride_vh + j[None, :]
        tl.store(target, tl.load(pointers, mask=mask, other=0.0), mask=mask)
        tl.store(target + half, tl.load(pointers + half, mask=mask, other=0.0), mask=mask)


def rope_store_kv(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, rope_table: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, row_offset: int) -> None:
    """The op eagle_kernels::rope_store_kv on CUDA; shapes as in eagle_kernels.rope_store_kv, with q, k, v and kv_cache in one of bf16 and fp16.

    A row whose page id is outside [0, pages), or whose page is past the end of the table, is not stored.
    """
    device = q.device
    check_tensor("q", q, (None, None, None, None), DTYPES, contiguous="last")
    batch, num_queries, q_heads, head_dim = q.shape
    refuse(head_dim % 2 != 0 or not 2 <= head_dim <= MAX_HEAD_DIM, "q", f"an even head_dim up to {MAX_HEAD_DIM}", head_dim)
    check_tensor("k", k, (batch, num_queries, None, head_dim), q.dtype, device, contiguous="last")
    kv_heads = k.shape[2]
    check_tensor("v", v, k.shape, q.dtype, device, contiguous="last")
    check_tensor("position_ids", position_ids, (batch, num_queries), torch.int64, device)
    check_tensor("rope_table", rope_table, (None, head_dim), torch.float32, device)
    check_tensor("kv_cache", kv_cache, (2, None, None, kv_heads, head_dim), q.dtype, device)
    check_tensor("page_table", page_table, (batch, None), torch.int32, device)
    check_tensor("seq_lens", seq_lens, (batch,), torch.int32, device)
    refuse(row_offset < 0, "row_offset", "0 or more", row_offset)
    if batch * num_queries == 0:
        return
    constants, options = _config(head_dim)
    blocks = triton.cdiv(q_heads, HEADS_OF_A_PROGRAM) + triton.cdiv(kv_heads, HEADS_OF_A_PROGRAM)
    _rope_store_kv_kernel[(batch * num_queries, blocks)](
        q, k, v, position_ids, rope_table, kv_cache, page_table, seq_lens, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], kv_cache.stride(0),
        num_queries, q_heads, kv_heads, head_dim, rope_table.shape[0], kv_cache.shape[1], kv_cache.shape[2], page_table.shape[1], row_offset, **constants, **options,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Every configuration that `rope_store_kv` can launch."""
    cases = []
    for head_dim in (2 * block for block in HALF_BLOCKS):
        constants, options = _config(head_dim)
        signature = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "position_ids_ptr": "*i64", "rope_table_ptr": "*fp32", "kv_ptr": "*bf16"}
        signature |= {"page_table_ptr": "*i32", "seq_lens_ptr": "*i32"}
        pointers = tuple(signature)
        strides = [f"stride_{tensor}{dimension}" for tensor in "qkv" for dimension in "bnh"] + ["stride_plane"]
        signature |= dict.fromkeys(strides, "i64")
        numbers = ("num_queries", "q_heads", "kv_heads", "head_dim", "max_positions", "num_pages", "page_size", "max_pages", "row_offset")
        signature |= dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
        cases.append(AotCase(f"rope_store_kv-{head_dim}", _rope_store_kv_kernel, signature, constants, (*pointers, *strides, "head_dim"), options, small=True))
    return in_both_dtypes(cases)
