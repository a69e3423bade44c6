"""Matrix products over packed weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.checks import check_tensor

PANEL = 16


class PackedWeight(NamedTuple):
    """A weight in the order in which `linear` reads it.

    data          layout "panels" (CPU): panels of 16 outputs, each contiguous over the inputs: fp32 [panels, K, 16], or bf16 [panels, K rounded up to even, 16] with pairs of inputs
                  interleaved: element (k, j) of a panel at k // 2 * 32 + j * 2 + k % 2. Outputs past out_features and inputs past in_features are zero.
                  layout "rows" (CUDA): the weight itself, [N, K] bf16 or fp16, contiguous.
                  Either with a leading dimension [experts] for `expert_linear`.
    out_features  N
    in_features   K
    """

    data: Tensor
    out_features: int
    in_features: int
    layout: str = "panels"


def pack_weight(weight: Tensor, layout: str | None = None) -> PackedWeight:
    """Pack a weight for `linear`.

    weight  [N, K] or [experts, N, K]; any strides; fp32 or bf16 for panels, bf16 or fp16 for rows
    layout  "panels" or "rows"; None: what the weight's device reads
    """
    if layout is None:
        layout = "rows" if weight.is_cuda else "panels"
    if layout == "rows":
        check_tensor("weight", weight, (None,) * (3 if weight.dim() == 3 else 2), (torch.bfloat16, torch.float16), contiguous="any")
        return PackedWeight(weight.contiguous(), *weight.shape[-2:], layout)
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.dim() not in (2, 3):
        raise ValueError(f"weight: expected [N, K] or [experts, N, K] float32 or bfloat16, got {list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}")
    out_features, in_features = weight.shape[-2:]
    panels = -(-out_features // PANEL)
    pairs = weight.dtype == torch.bfloat16
    depth = in_features + in_features % 2 if pairs else in_features
    padded = weight.new_zeros(*weight.shape[:-2], panels * PANEL, depth)
    padded[..., :out_features, :in_features] = weight
    lead = weight.shape[:-2]
    if pairs:
        data = padded.view(*lead, panels, PANEL, depth // 2, 2).transpose(-3, -2)
    else:
        data = padded.view(*lead, panels, PANEL, depth).transpose(-2, -1)
    return PackedWeight(data.contiguous().view(*lead, panels, depth, PANEL), out_features, in_features)


def unpack_weight(packed: PackedWeight) -> Tensor:
    """The weight [N, K] (or [experts, N, K]) that `pack_weight` was given."""
    if packed.layout == "rows":
        return packed.data
    *lead, panels, depth, _ = packed.data.shape
    if packed.data.dtype == torch.bfloat16:
        rows = packed.data.view(*lead, panels, depth // 2, PANEL, 2).transpose(-3, -2)
    else:
        rows = packed.data.transpose(-2, -1)
    return rows.reshape(*lead, panels * PANEL, depth)[..., : packed.out_features, : packed.in_features].contiguous()


def slice_outputs(packed: PackedWeight, start: int) -> PackedWeight:
    """The outputs start, start + 1, ... of a weight [N, K] as one of its own: in the same memory where a panel begins at `start` (at a multiple of 16; layout "rows": anywhere), else packed anew. ValueError outside [0, N)."""
    if not 0 <= start < packed.out_features:
        raise ValueError(f"start: expected 0 to {packed.out_features - 1}, got {start}")
    if packed.layout == "panels" and start % PANEL != 0:
        return pack_weight(unpack_weight(packed)[start:], packed.layout)
    return packed._replace(data=packed.data[start if packed.layout == "rows" else start // PANEL :], out_features=packed.out_features - start)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, deterministic: bool = False, out: Tensor | None = None) -> Tensor:
    """y = x W^T + bias.

    x        [..., K] fp32; as a matrix its rows may have any stride. CUDA: the weight's dtype
    weight   PackedWeight of an [N, K] weight
    bias     [N] fp32 or None. CUDA: the weight's dtype
    out      [..., N] fp32 or None. CUDA: x's dtype or, without bias, fp32
    returns  [..., N], by default in x's dtype

    CPU: row-invariant. Every output is a sum, over blocks of 256 k in order, of one chain of fused multiply-adds each, in fp32, whatever the number of rows and threads.
    CUDA: cuBLAS, whose order of summation may depend on the number of rows; with deterministic=True our kernel, row-invariant.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.out_features)
    OPS.linear(rows, weight.data, bias, weight.out_features, deterministic, out if out.dim() == 2 else out.view(-1, weight.out_features))
    return out


def embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows of a packed weight, so that an embedding tied to the head is held once.

    ids      [...] int64; ids below 0 read row 0, ids of N and above raise ValueError
    weight   PackedWeight of an [N, K] weight
    returns  [..., K] fp32. CUDA: the weight's dtype
    """
    out = torch.empty(*ids.shape, weight.in_features, dtype=torch.float32 if weight.layout == "panels" else weight.data.dtype, device=ids.device)
    OPS.embedding(ids.reshape(-1), weight.data, weight.out_features, out.view(-1, weight.in_features))
    return out


def expert_linear(x: Tensor, weights: PackedWeight, expert_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """y[m] = x[m] W[expert_ids[m]]^T, row-invariant.

    x           [M, K] fp32
    weights     PackedWeight of an [experts, N, K] weight
    expert_ids  [M] int32; a row whose id is outside [0, experts) gives zeros
    returns     [M, N] fp32
    """
    if out is None:
        out = x.new_empty(x.shape[0], weights.out_features)
    OPS.expert_linear(x, weights.data, expert_ids, weights.out_features, out)
    return out


def route_experts(router_logits: Tensor, top_k: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """Softmax over the experts and the best top_k of them (probability descending, id ascending).

    router_logits  [M, experts] fp32
    normalize      divide the chosen probabilities by their sum
    returns        weights [M, top_k] fp32, expert_ids [M, top_k] int32
    """
    weights = router_logits.new_empty(router_logits.shape[0], top_k)
    expert_ids = torch.empty(router_logits.shape[0], top_k, dtype=torch.int32, device=router_logits.device)
    OPS.route_experts(router_logits, normalize, weights, expert_ids)
    return weights, expert_ids
