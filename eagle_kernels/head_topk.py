"""The best tokens of a draft head, without the logits of the others."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS
from eagle_kernels.linear import PackedWeight
from eagle_kernels.types import HeadTopK

# Tokens per tile of the CUDA kernels.
HEAD_TILE, LOGITS_TILE = 64, 1024


def head_topk(features: Tensor, weight: PackedWeight, top_k: int, *, out: HeadTopK | None = None) -> HeadTopK:
    """The top_k and log-softmax statistics of features W^T, per tile of the vocabulary; every logit has the bits that `linear` would give it.

    features  [..., H], last dimension contiguous; fp32 on the CPU, the dtype of the weight on CUDA
    weight    PackedWeight of a [V, H] head
    top_k     1 to min(64, V)
    out       HeadTopK of the result's shapes, or None; modified
    returns   HeadTopK of the leading shape of features

    Per row and tile the order is (logit descending, id ascending), NaN counts as -inf. Row-invariant.
    """
    if out is None:
        out = empty_head_topk(features.shape[:-1], weight.out_features, top_k, HEAD_TILE, features.device)
    OPS.head_topk(features if features.dim() == 2 else features.reshape(-1, features.shape[-1]), weight.data, weight.out_features, *_rows(out))
    return out


def logits_topk(logits: Tensor, top_k: int, *, out: HeadTopK | None = None) -> HeadTopK:
    """`head_topk` of given logits.

    logits   [..., V] fp32, last dimension contiguous
    top_k    1 to min(64, V)
    out      HeadTopK of the result's shapes, or None; modified
    returns  HeadTopK of the leading shape of logits
    """
    if out is None:
        out = empty_head_topk(logits.shape[:-1], logits.shape[-1], top_k, LOGITS_TILE, logits.device)
    OPS.logits_topk(logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1]), *_rows(out))
    return out


def empty_head_topk(lead: torch.Size, vocab_size: int, top_k: int, tile: int, device: torch.device) -> HeadTopK:
    """Uninitialised result for rows of shape `lead`; one tile on the CPU, tiles of `tile` tokens on CUDA."""
    if not 1 <= top_k <= min(64, vocab_size):
        raise ValueError(f"top_k: expected 1 to {min(64, vocab_size)}, got {top_k}")
    tiles = -(-vocab_size // tile) if device.type == "cuda" else 1
    return HeadTopK(
        torch.empty(*lead, tiles, top_k, dtype=torch.int64, device=device),
        torch.empty(*lead, tiles, dtype=torch.float32, device=device),
        torch.empty(*lead, tiles, dtype=torch.float32, device=device),
    )


def _rows(head: HeadTopK) -> tuple[Tensor, Tensor, Tensor]:
    return head.keys.view(-1, *head.keys.shape[-2:]), head.max.view(-1, head.max.shape[-1]), head.sum_exp.view(-1, head.sum_exp.shape[-1])
