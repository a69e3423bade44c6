"""Launches the kernels of tree_attention_kernels.py."""

import functools

import torch
import triton
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton.common import AotCase
from eagle_kernels.triton.tree_attention_kernels import _merge_kernel, _own_kernel, _shared_kernel

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
BLOCK_N = 64  # keys of the largest block
BLOCK_S = 32  # splits that the merge takes at once
SPLIT = 256  # keys of a split in exact mode. A row's partial results are 1/256 of the bytes of the split's keys and values (fp32 and bf16), so 256 rows of a KV head write as much as they read
MAX_QUERIES = 256


def _block_m(rows: int, head_dim: int, general: bool, deterministic: bool) -> int:
    """Rows of a tile. 64 always when deterministic, so that every call uses the same instructions. 128 halves how often the prefix comes from L2; where it would spill registers it is not used."""
    return 128 if rows > 64 and head_dim in (64, 128) and not general and not deterministic else 64


def _attend_config(head_dim: int, block_m: int, general: bool) -> tuple[dict, dict]:
    """Constants and options of the two attending kernels, which share them so that both run the same instructions. general: there is a window or a soft cap.

    Blocks of 64 keys where they fit the registers of every chip, else of 32 or 16 (at head_dim 128 with 64 keys: 8 to 80 bytes of spills on sm_80 and 100). One stage where two need more registers
    (general form), or more shared memory than the 99 KiB of sm_86, 89 and 120 (head_dim 256). Without maxnreg ptxas settles for 128 registers in places, and spills.
    """
    block_n = 16 if head_dim == 256 and not general else 64 if block_m == 128 or (head_dim == 64 and not general) else 32
    constants = {"GENERAL": general, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": block_m, "BLOCK_N": block_n}
    options = {"num_warps": 8 if block_m == 128 or head_dim == 256 else 4, "num_stages": 1 if general or head_dim == 256 else 2, "maxnreg": 255, "enable_fp_fusion": False}
    return constants, options


def _merge_config(head_dim: int) -> tuple[dict, dict]:
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_S": BLOCK_S}, {"num_warps": 4, "num_stages": 1, "maxnreg": 128, "enable_fp_fusion": False}


@functools.cache
def _num_sms(device: torch.device) -> int:
    # Only the interpreter comes here without a GPU; a small number makes its splits many programs' work.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tree_attention(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, seq_lens: Tensor, mask: Tensor | None, scale: float, window: int, soft_cap: float, deterministic: bool, out: Tensor, lse: Tensor | None
) -> None:
    """The op eagle_kernels::tree_attention on CUDA; shapes as in eagle_kernels.tree_attention, with q, kv_cache and out in one of bf16 and fp16, head_dim 64, 80, 96, 128 or 256, and a page size that is a power of two."""
    device = q.device
    check_tensor("q", q, (None, None, None, None), DTYPES, contiguous="last")
    batch, num_queries, num_heads, head_dim = q.shape
    check_tensor("kv_cache", kv_cache, (2, None, None, None, head_dim), q.dtype, device, contiguous="last")
    page_size, num_kv_heads = kv_cache.shape[2:4]
    check_tensor("page_table", page_table, (batch, None), torch.int32, device)
    check_tensor("seq_lens", seq_lens, (batch,), torch.int32, device)
    check_tensor("out", out, q.shape, q.dtype, device, contiguous="last")
    num_words = 0
    if mask is not None:
        check_tensor("packed_ancestor_mask", mask, (batch, num_queries, None), torch.int64, device)
        num_words = mask.shape[2]
    if lse is not None:
        check_tensor("lse", lse, q.shape[:3], torch.float32, device)
    refuse(head_dim not in HEAD_DIMS, "q", f"head_dim {', '.join(map(str, HEAD_DIMS))} on CUDA", head_dim)
    refuse(num_kv_heads == 0 or num_heads % max(num_kv_heads, 1) != 0, "q", f"a multiple of the cache's {num_kv_heads} heads", num_heads)
    refuse(page_size & (page_size - 1) != 0, "kv_cache", "a page size that is a power of two on CUDA", page_size)
    refuse(mask is not None and not 1 <= num_words <= 4, "packed_ancestor_mask", "1 to 4 words", num_words)
    refuse(num_queries > MAX_QUERIES, "q", f"at most {MAX_QUERIES} queries", num_queries)
    refuse(window < 0, "window", "0 (none) or more", window)
    refuse(soft_cap < 0, "soft_cap", "0 (none) or more", soft_cap)
    if q.numel() == 0:
        return

    group = num_heads // num_kv_heads
    rows = num_queries * group
    general = soft_cap > 0 or window > 0
    block_m = _block_m(rows, head_dim, general, deterministic)
    tiles = triton.cdiv(rows, block_m)
    capacity = page_table.shape[1] * page_size + MAX_QUERIES
    # As many programs as run at once: two on an SM, one with 128 rows, whose 8 warps of about 207 registers fill it. More would only write more partial results.
    programs = max(1, (1 if block_m == 128 else 2) * _num_sms(device) // (tiles * batch * num_kv_heads))
    if deterministic:
        split_len, num_splits = SPLIT, triton.cdiv(capacity, SPLIT)
        programs = min(programs, num_splits)
    else:
        split_len = 0
        num_splits = programs = max(2, min(programs, triton.cdiv(capacity, BLOCK_N) + 1))
    partial = torch.empty(batch, num_kv_heads, num_splits, rows, head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(batch, num_kv_heads, num_splits, rows, 2, dtype=torch.float32, device=device)
    mask_or_any = torch.empty(1, dtype=torch.int64, device=device) if mask is None else mask  # never read, but its type is part of what is compiled
    causal = int(mask is None)

    constants, options = _attend_config(head_dim, block_m, general)
    attend_args = (
        q, kv_cache, page_table, seq_lens, mask_or_any, partial, stats, *q.stride()[:3], *kv_cache.stride()[:4], scale, soft_cap,
        group, num_queries, num_heads, num_kv_heads, page_table.shape[1], page_size.bit_length() - 1, num_words, num_splits, window, causal, split_len,
    )  # fmt: skip
    _shared_kernel[(programs, tiles, batch * num_kv_heads)](*attend_args, **constants, **options)
    if deterministic:
        _own_kernel[(num_queries, batch * num_kv_heads)](*attend_args, **constants, **options)
    constants, options = _merge_config(head_dim)
    _merge_kernel[(num_heads, num_queries, batch)](
        partial, stats, seq_lens, mask_or_any, out, partial if lse is None else lse, *out.stride()[:3],
        num_queries, num_heads, num_kv_heads, num_words, num_splits, window, causal, split_len, int(lse is not None), **constants, **options,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    """Every configuration that `tree_attention` can launch."""
    cases = []
    for name, dtype in (("bf16", "*bf16"), ("fp16", "*fp16")):
        pointers = {"q_ptr": dtype, "kv_ptr": dtype, "page_table_ptr": "*i32", "seq_lens_ptr": "*i32", "mask_ptr": "*i64", "partial_ptr": "*fp32", "stats_ptr": "*fp32"}
        strides = dict.fromkeys(("stride_qb", "stride_qn", "stride_qh", "stride_plane", "stride_page", "stride_slot", "stride_head"), "i64") | {"stride_qn": "i32", "stride_qh": "i32"}
        numbers = dict.fromkeys(("scale", "soft_cap"), "fp32") | dict.fromkeys(
            ("group", "num_queries", "num_heads", "num_kv_heads", "max_pages", "page_shift", "num_words", "num_splits", "window", "causal", "split_len"), "i32"
        )
        for head_dim in HEAD_DIMS:
            for general in (False, True):
                for block_m in sorted({_block_m(rows, head_dim, general, False) for rows in (64, 65)}):
                    constants, options = _attend_config(head_dim, block_m, general)
                    signature = pointers | strides | numbers | dict.fromkeys(constants, "constexpr")
                    for kernel, what in ((_shared_kernel, "shared"), (_own_kernel, "own")):
                        if what == "shared" or block_m == 64:
                            title = f"tree_attention-{what}-{name}-d{head_dim}-m{block_m}" + ("-general" if general else "")
                            cases.append(AotCase(title, kernel, signature, constants, (*pointers, *strides), options, mma="mma"))
            constants, options = _merge_config(head_dim)
            signature = {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "seq_lens_ptr": "*i32", "mask_ptr": "*i64", "out_ptr": dtype, "lse_ptr": "*fp32"}
            signature |= dict.fromkeys(("stride_ob", "stride_on", "stride_oh"), "i64")
            signature |= dict.fromkeys(("num_queries", "num_heads", "num_kv_heads", "num_words", "num_splits", "window", "causal", "split_len", "has_lse"), "i32")
            signature |= dict.fromkeys(constants, "constexpr")
            cases.append(AotCase(f"tree_attention-merge-{name}-d{head_dim}", _merge_kernel, signature, constants, tuple(signature)[:9], options, small=True))
    return cases
