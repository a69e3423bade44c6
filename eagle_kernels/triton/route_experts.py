"""route_experts on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton.common import AotCase, to_float

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONSTANTS = {"BLOCK": 256}  # the greatest number of experts
OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["experts", "normalize", "top_k"])
def _route_experts_kernel(
    logits_ptr,  # [rows, experts] contiguous
    weights_ptr,  # [rows, top_k] fp32
    expert_ids_ptr,  # [rows, top_k] int32
    experts,
    top_k,
    normalize,
    BLOCK: tl.constexpr,
):
    """One warp per row; top_k rounds of arg-max. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    logits = to_float(tl.load(logits_ptr + row * experts + e, mask=e < experts, other=-float("inf")))
    probs = tl.exp(logits - tl.max(logits, 0))
    probs = tl.where(e < experts, probs, 0.0)
    probs = probs / tl.sum(probs, 0)
    # NaN counts as -inf, so that every round finds an expert.
    order = tl.where(logits > -float("inf"), logits, -float("inf"))
    place = tl.full((BLOCK,), -1, tl.int32)
    chosen_total = tl.sum(tl.zeros((BLOCK,), tl.float32), 0)
    for i in range(top_k):
        left = (place < 0) & (e < experts)
        greatest = tl.max(tl.where(left, order, -float("inf")), 0)
        best = tl.min(tl.where(left & (order == greatest), e, BLOCK), 0)
        place = tl.where(e == best, i, place)
        chosen_total += tl.sum(tl.where(e == best, probs, 0.0), 0)
    if normalize != 0:
        probs = probs / chosen_total
    tl.store(weights_ptr + row * top_k + place, probs, mask=place >= 0)
    tl.store(expert_ids_ptr + row * top_k + place, e, mask=place >= 0)


def route_experts(router_logits: Tensor, normalize: bool, weights: Tensor, expert_ids: Tensor) -> None:
    """The op eagle_kernels::route_experts on CUDA.

    router_logits  [M, experts] fp32, bf16 or fp16, at most 256 experts
    weights        [M, top_k] fp32; modified
    expert_ids     [M, top_k] int32, by (probability descending, id ascending); modified
    """
    check_tensor("router_logits", router_logits, (None, None), DTYPES)
    rows, experts = router_logits.shape
    refuse(not 1 <= experts <= CONSTANTS["BLOCK"], "router_logits", f"1 to {CONSTANTS['BLOCK']} experts", experts)
    check_tensor("weights", weights, (rows, None), torch.float32, router_logits.device)
    top_k = weights.shape[1]
    refuse(not 1 <= top_k <= experts, "top_k", f"1 to {experts} experts", top_k)
    check_tensor("expert_ids", expert_ids, (rows, top_k), torch.int32, router_logits.device)
    if rows > 0:
        _route_experts_kernel[(rows,)](router_logits, weights, expert_ids, experts, top_k, int(normalize), **CONSTANTS, **OPTIONS)


def aot_cases() -> list[AotCase]:
    """Every configuration that `route_experts` can launch."""
    signature = {"logits_ptr": "*fp32", "weights_ptr": "*fp32", "expert_ids_ptr": "*i32", "experts": "i32", "top_k": "i32", "normalize": "i32", "BLOCK": "constexpr"}
    return [AotCase("route_experts", _route_experts_kernel, signature, CONSTANTS, ("logits_ptr", "weights_ptr", "expert_ids_ptr"), OPTIONS, wide_loads=False, small=True)]
