"""The end of a step on the GPU: features, tokens and lengths in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor
from eagle_kernels.triton.common import AotCase

CONSTANTS = {"BLOCK_H": 1024}
COUNT_OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["nodes", "width", "most_missed"])
def _advance_kernel(
    tokens_ptr,  # [B, nodes] int64
    features_ptr,  # [B, nodes, hidden]
    accepted_ptr,  # [B, width] int32
    num_accepted_ptr,  # [B] int32
    bonus_ptr,  # [B] int64
    active_ptr,  # [B] bool
    seq_lens_ptr,  # [B] int32
    root_tokens_ptr,  # [B] int64
    num_pending_ptr,  # [B] int64
    pending_tokens_ptr,  # [B, width] int64
    pending_features_ptr,  # [B, width, hidden]
    num_missed_ptr,  # [B] int64
    missed_tokens_ptr,  # [B, most_missed] int64
    missed_features_ptr,  # [B, most_missed, hidden]
    nodes, width, hidden, most_missed,
    BLOCK_H: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """Grid (width, B): program (i, b) copies the feature of accepted node i and the token after it, KEEPS: what stood in their place to the missed pairs first; program 0 of a sequence also its lengths,
    which no other program reads. With KEEPS num_pending is read by all and left to `_count_kernel`."""
    i, b = tl.program_id(0), tl.program_id(1)
    if tl.load(active_ptr + b):
        last = tl.load(num_accepted_ptr + b)
        bonus = tl.load(bonus_ptr + b)
        node = tl.maximum(tl.load(accepted_ptr + b * width + i), 0)
        next_node = tl.maximum(tl.load(accepted_ptr + b * width + i + 1, mask=i < last, other=0), 0)
        token = tl.where(i == last, bonus, tl.load(tokens_ptr + b * nodes + next_node))
        if KEEPS:
            place = tl.load(num_missed_ptr + b) + i
            if (i < tl.load(num_pending_ptr + b)) & (place < most_missed):
                place += b.to(tl.int64) * most_missed
                tl.store(missed_tokens_ptr + place, tl.load(pending_tokens_ptr + b * width + i))
                kept = pending_features_ptr + (b * width + i).to(tl.int64) * hidden
                for start in range(0, hidden, BLOCK_H):
                    h = start + tl.arange(0, BLOCK_H)
                    tl.store(missed_features_ptr + place * hidden + h, tl.load(kept + h, mask=h < hidden), mask=h < hidden)
            tl.debug_barrier()
        tl.store(pending_tokens_ptr + b * width + i, token)
        source = features_ptr + (b * nodes + node).to(tl.int64) * hidden
        destination = pending_features_ptr + (b * width + i).to(tl.int64) * hidden
        for start in range(0, hidden, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            tl.store(destination + h, tl.load(source + h, mask=h < hidden), mask=h < hidden)
        if i == 0:
            if not KEEPS:
                tl.store(num_pending_ptr + b, (last + 1).to(tl.int64))
            tl.store(root_tokens_ptr + b, bonus)
            tl.store(seq_lens_ptr + b, tl.load(seq_lens_ptr + b) + last + 1)


@triton.jit
def _count_kernel(
    num_accepted_ptr,  # [B] int32
    active_ptr,  # [B] bool
    num_pending_ptr,  # [B] int64
    num_missed_ptr,  # [B] int64
):
    """Grid (B,): the lengths that the programs of `_advance_kernel` have read."""
    b = tl.program_id(0)
    if tl.load(active_ptr + b):
        tl.store(num_missed_ptr + b, tl.load(num_missed_ptr + b) + tl.load(num_pending_ptr + b))
        tl.store(num_pending_ptr + b, (tl.load(num_accepted_ptr + b) + 1).to(tl.int64))


def advance(
    tokens: Tensor, features: Tensor, accepted_nodes: Tensor, num_accepted_drafts: Tensor, bonus_token: Tensor, active: Tensor, seq_lens: Tensor, root_tokens: Tensor, num_pending: Tensor,
    pending_tokens: Tensor, pending_features: Tensor, num_missed: Tensor | None = None, missed_tokens: Tensor | None = None, missed_features: Tensor | None = None,
) -> None:  # fmt: skip
    """The op eagle_kernels::advance on CUDA; shapes as in eagle_kernels.advance."""
    device = tokens.device
    check_tensor("tokens", tokens, (None, None), torch.int64)
    batch, nodes = tokens.shape
    check_tensor("features", features, (batch, nodes, None), DTYPES, device)
    hidden = features.shape[2]
    check_tensor("accepted_nodes", accepted_nodes, (batch, None), torch.int32, device)
    width = accepted_nodes.shape[1]
    check_tensor("num_accepted_drafts", num_accepted_drafts, (batch,), torch.int32, device)
    check_tensor("bonus_token", bonus_token, (batch,), torch.int64, device)
    check_tensor("active", active, (batch,), torch.bool, device)
    check_tensor("seq_lens", seq_lens, (batch,), torch.int32, device)
    check_tensor("root_tokens", root_tokens, (batch,), torch.int64, device)
    check_tensor("num_pending", num_pending, (batch,), torch.int64, device)
    check_tensor("pending_tokens", pending_tokens, (batch, width), torch.int64, device)
    check_tensor("pending_features", pending_features, (batch, width, hidden), features.dtype, device)
    keeps, most_missed = num_missed is not None, 0
    if (missed_tokens is not None) != keeps or (missed_features is not None) != keeps:
        raise ValueError("num_missed, missed_tokens, missed_features: expected all of them or none")
    if keeps:
        check_tensor("num_missed", num_missed, (batch,), torch.int64, device)
        check_tensor("missed_tokens", missed_tokens, (batch, None), torch.int64, device)
        most_missed = missed_tokens.shape[1]
        check_tensor("missed_features", missed_features, (batch, most_missed, hidden), features.dtype, device)
    if batch == 0:
        return
    missed = (num_missed, missed_tokens, missed_features) if keeps else (num_pending, pending_tokens, pending_features)
    _advance_kernel[(width, batch)](
        tokens, features, accepted_nodes, num_accepted_drafts, bonus_token, active, seq_lens, root_tokens, num_pending, pending_tokens, pending_features, *missed, nodes, width, hidden, most_missed,
        KEEPS=keeps, **CONSTANTS, **OPTIONS,
    )  # fmt: skip
    if keeps:
        _count_kernel[(batch,)](num_accepted_drafts, active, num_pending, num_missed, **COUNT_OPTIONS)


def aot_cases() -> list[AotCase]:
    """Every configuration that `advance` can launch."""
    cases = []
    for name in ("bf16", "fp16", "fp32"):
        pointers = {"tokens_ptr": "*i64", "features_ptr": f"*{name}", "accepted_ptr": "*i32", "num_accepted_ptr": "*i32", "bonus_ptr": "*i64", "active_ptr": "*i1", "seq_lens_ptr": "*i32",
                    "root_tokens_ptr": "*i64", "num_pending_ptr": "*i64", "pending_tokens_ptr": "*i64", "pending_features_ptr": f"*{name}",
                    "num_missed_ptr": "*i64", "missed_tokens_ptr": "*i64", "missed_features_ptr": f"*{name}"}  # fmt: skip
        signature = pointers | {"nodes": "i32", "width": "i32", "hidden": "i32", "most_missed": "i32", "BLOCK_H": "constexpr", "KEEPS": "constexpr"}
        for keeps in (False, True):
            cases.append(AotCase(f"advance-{name}" + ("-keeps" if keeps else ""), _advance_kernel, signature, CONSTANTS | {"KEEPS": keeps}, (*pointers, "hidden"), OPTIONS, small=True))
    pointers = {"num_accepted_ptr": "*i32", "active_ptr": "*i1", "num_pending_ptr": "*i64", "num_missed_ptr": "*i64"}
    cases.append(AotCase("advance-count", _count_kernel, pointers, {}, (*pointers,), COUNT_OPTIONS, wide_loads=False, small=True))
    return cases
