"""References of head_topk and logits_topk: the whole vocabulary as one tile."""

import math
import struct

import torch

from eagle_kernels.linear import PackedWeight
from eagle_kernels.types import HeadTopK

from .expand import best_by_score
from .linear import linear


def head_topk(features: torch.Tensor, weight: PackedWeight, top_k: int) -> HeadTopK:
    """logits_topk of features times the transposed head.

    features  [..., H]; computed in its dtype, then rounded to fp32
    weight    packed [V, H]
    returns   HeadTopK of one tile
    """
    return logits_topk(linear(features, weight).float(), top_k)


def logits_topk(logits: torch.Tensor, top_k: int, *, tile: int | None = None) -> HeadTopK:
    """The top_k and log-softmax statistics of every tile of every row.

    logits   [..., V] fp32
    tile     tokens per tile; None = all
    returns  HeadTopK; keys [..., tiles, top_k] by (logit desc, id asc), NaN counts as -inf
    """
    *lead, vocab_size = logits.shape
    tile = tile or vocab_size
    tiles = -(-vocab_size // tile)
    rows = logits.reshape(-1, vocab_size)
    result = HeadTopK(torch.full((rows.shape[0], tiles, top_k), -(2**63)), torch.empty(rows.shape[0], tiles), torch.empty(rows.shape[0], tiles))
    for r, row in enumerate(rows.tolist()):
        for t in range(tiles):
            values = [-math.inf if math.isnan(value) else value for value in row[t * tile : (t + 1) * tile]]
            for i, place in enumerate(best_by_score(values, top_k)):
                result.keys[r, t, i] = topk_key(values[place], t * tile + place)
            largest = max(values)
            result.max[r, t] = largest
            result.sum_exp[r, t] = (0.0 if largest < 0 else 1.0) if math.isinf(largest) else math.fsum(math.exp(value - largest) for value in values)
    return HeadTopK(result.keys.view(*lead, tiles, top_k), result.max.view(*lead, tiles), result.sum_exp.view(*lead, tiles))


def topk_key(logit: float, token: int) -> int:
    """A 64-bit number that is greater for a greater logit, and of equal logits for the smaller id."""
    (bits,) = struct.unpack("<i", struct.pack("<f", logit + 0.0))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered * 2**32 + (0xFFFFFFFF - token)
