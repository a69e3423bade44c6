"""The CUDA side of the ops that are not CUDA C++: Triton launchers, and cuBLAS for products that need not be deterministic. Imported where torch has CUDA."""

import torch
from torch import Tensor

from eagle_kernels.checks import check_tensor, refuse
from eagle_kernels.triton import accept_rejection, advance, head_topk, noise, rms_norm, rope_store_kv, route_experts, sample, silu_mul, tree_attention
from eagle_kernels.triton import linear as linear_kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, deterministic: bool, out: Tensor) -> None:
    """The op eagle_kernels::linear: x [M, K] and weight [N, K] in bf16 or fp16, bias [N] in their dtype, out [M, N] in their dtype or, without bias, fp32."""
    if deterministic:
        linear_kernels.linear(x, weight, bias, out_features, out)
        return
    check_tensor("x", x, (None, None), (torch.bfloat16, torch.float16), contiguous="last")
    check_tensor("weight", weight, (out_features, x.shape[1]), x.dtype, x.device)
    check_tensor("out", out, (x.shape[0], out_features), (x.dtype, torch.float32), x.device, contiguous="last")
    if bias is not None:
        check_tensor("bias", bias, (out_features,), x.dtype, x.device)
        refuse(out.dtype != x.dtype, "out", f"{x.dtype}, as there is a bias", out.dtype)
        torch.addmm(bias, x, weight.t(), out=out)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


LAUNCHERS = {
    "accept_rejection": accept_rejection.accept_rejection,
    "advance": advance.advance,
    "draw_children": sample.draw_children,
    "embedding": linear_kernels.embedding,
    "expert_linear": linear_kernels.expert_linear,
    "filter_probs": sample.filter_probs,
    "head_topk": head_topk.head_topk,
    "linear": linear,
    "logits_topk": head_topk.logits_topk,
    "noise": noise.noise,
    "rms_norm": rms_norm.rms_norm,
    "rope_store_kv": rope_store_kv.rope_store_kv,
    "route_experts": route_experts.route_experts,
    "sample": sample.sample,
    "silu_mul": silu_mul.silu_mul,
    "tree_attention": tree_attention.tree_attention,
}


def register() -> None:
    """Make the ops known for CUDA tensors; those in CUDA C++ register themselves when the extension is loaded."""
    for name, launcher in LAUNCHERS.items():
        torch.library.impl(f"eagle_kernels::{name}", "CUDA", launcher)
