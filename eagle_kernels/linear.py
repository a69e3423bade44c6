"""Matrix products over packed weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_kernels._extension import OPS

PANEL = 16


class PackedWeight(NamedTuple):
    """A weight in the order in which `linear` reads it: panels of 16 outputs, each contiguous over the inputs.

    data          fp32 [panels, K, 16], or bf16 [panels, K rounded up to even, 16] with pairs of inputs interleaved: element (k, j) of a panel at k // 2 * 32 + j * 2 + k % 2;
                  with a leading dimension [experts] for `expert_linear`. Outputs past out_features and inputs past in_features are zero.
    out_features  N
    in_features   K
    """

    data: Tensor
    out_features: int
    in_features: int


def pack_weight(weight: Tensor) -> PackedWeight:
    """Pack a weight for `linear`.

    weight  [N, K] or [experts, N, K], fp32 or bf16; any strides
    """
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
    *lead, panels, depth, _ = packed.data.shape
    if packed.data.dtype == torch.bfloat16:
        rows = packed.data.view(*lead, panels, depth // 2, PANEL, 2).transpose(-3, -2)
    else:
        rows = packed.data.transpose(-2, -1)
    return rows.reshape(*lead, panels * PANEL, depth)[..., : packed.out_features, : packed.in_features].contiguous()


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """y = x W^T + bias, row-invariant.

    x        [..., K] fp32; as a matrix its rows may have any stride
    weight   PackedWeight of an [N, K] weight, fp32 or bf16
    bias     [N] fp32 or None
    out      [..., N] fp32 or None
    returns  [..., N] fp32

    Every output is a sum, over blocks of 256 k in order, of one chain of fused multiply-adds each, in fp32, whatever the number of rows and threads.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.out_features)
    OPS.linear(rows, weight.data, bias, weight.out_features, out if out.dim() == 2 else out.view(-1, weight.out_features))
    return out


def embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows of a packed weight, so that an embedding tied to the head is held once.

    ids      [...] int64; ids below 0 read row 0, ids of N and above raise ValueError
    weight   PackedWeight of an [N, K] weight
    returns  [..., K] fp32
    """
    out = torch.empty(*ids.shape, weight.in_features, dtype=torch.float32, device=ids.device)
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
