"""Results with three or more tensors. B sequences, F or n frontier nodes, N tree nodes, H features, W mask words, P pool slots."""

from typing import NamedTuple

import torch


class DraftPool(NamedTuple):
    """Every candidate of one tree, level after level; `expand` fills it, `rerank` picks from it.

    tokens   [B, P] int64, target token ids
    scores   [B, P] fp32, cumulative draft log-probability
    parents  [B, P] int32, pool index of the parent; -1 = the root
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


class Frontier(NamedTuple):
    """The nodes that the next draft forward expands.

    tokens      [B, n] int64, target token ids
    scores      [B, n] fp32, cumulative draft log-probability
    pool_index  [B, n] int32, the node's slot in the DraftPool; -1 = the root
    features    [B, n, H] fp32, the feature of the node's parent
    mask        [B, n, W] int64, packed: which tentative rows of the drafter's cache are ancestor-or-self
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    pool_index: torch.Tensor
    features: torch.Tensor
    mask: torch.Tensor


class HeadTopK(NamedTuple):
    """The best of the draft vocabulary and log-softmax statistics, per tile of the vocabulary; `expand_topk` merges the tiles. A CPU tile is the whole vocabulary.

    keys     [..., tiles, top_k] int64, descending: ordered(logit) << 32 | (0xFFFFFFFF - id), with the int32 bits i of logit + 0.0 (NaN: -inf) and ordered(i) = i ^ ((i >> 31) & 0x7FFFFFFF);
             -2^63 past the end of a tile
    max      [..., tiles] fp32, greatest logit of the tile (NaN counts as -inf)
    sum_exp  [..., tiles] fp32, sum of exp(logit - max) over the tile; 0 when max is -inf, 1 when it is +inf

    Tiles stand in the order of their ids.
    """

    keys: torch.Tensor
    max: torch.Tensor
    sum_exp: torch.Tensor


class Tree(NamedTuple):
    """The nodes to verify: the root, then the chosen candidates, parents before children.

    tokens                [B, N] int64
    parent                [B, N] int32, parent[i] < i; root -1
    depth                 [B, N] int32; root 0
    packed_ancestor_mask  [B, N, W] int64, bit j of word j // 64: node j is ancestor-or-self
    position_ids          [B, N] int64, seq_len + depth
    """

    tokens: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    packed_ancestor_mask: torch.Tensor
    position_ids: torch.Tensor


class Accepted(NamedTuple):
    """What the target kept of one tree.

    accepted_nodes       [B, max_depth + 1] int32, root first, ascending, -1 after the end
    num_accepted_drafts  [B] int32, length of the accepted path without the root
    bonus_token          [B] int64, the target's token after the accepted path: the next root
    """

    accepted_nodes: torch.Tensor
    num_accepted_drafts: torch.Tensor
    bonus_token: torch.Tensor
