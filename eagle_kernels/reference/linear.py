"""References of the ops on packed weights: linear, embedding, expert_linear; and of route_experts."""

import torch

from eagle_kernels.linear import PackedWeight, unpack_weight


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x times the transposed weight, plus bias.

    x        [..., K]; computed in its dtype
    weight   packed [N, K]
    bias     [N]
    returns  [..., N]
    """
    y = x @ unpack_weight(weight).to(x.dtype).T
    if bias is not None:
        y = y + bias
    return y if out is None else out.copy_(y)


def embedding(ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Rows of a packed weight; ids below 0 read row 0.

    ids      [...] int64
    weight   packed [N, K]
    returns  [..., K] fp32
    """
    return unpack_weight(weight)[ids.clamp(min=0)].float()


def expert_linear(
    x: torch.Tensor, weights: PackedWeight, expert_ids: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row times the weight of its own expert.

    x           [M, K]; computed in its dtype
    weights     packed [E, N, K]
    expert_ids  [M] int32, each below E
    returns     [M, N]
    """
    unpacked = unpack_weight(weights).to(x.dtype)
    y = torch.empty(x.shape[0], unpacked.shape[1], dtype=x.dtype)
    for row, expert in enumerate(expert_ids.tolist()):
        y[row] = x[row] @ unpacked[expert].T
    return y if out is None else out.copy_(y)


def route_experts(
    router_logits: torch.Tensor, top_k: int, normalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each row.

    router_logits  [M, E]; computed in its dtype
    returns        (weights [M, top_k], expert_ids [M, top_k] int32), by (probability desc, id asc)

    weights = softmax over all experts, with normalize divided by the sum of the chosen ones
    """
    probs = router_logits.softmax(-1)
    # A stable sort keeps the smaller id first among equals.
    sorted_probs, ids = probs.sort(dim=-1, descending=True, stable=True)
    weights, expert_ids = sorted_probs[:, :top_k], ids[:, :top_k].int()
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.contiguous(), expert_ids.contiguous()
