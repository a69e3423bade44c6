"""The packed ancestor mask: bit j of word j // 64 says that node j is ancestor-or-self."""

import torch


def unpack_ancestor_mask(packed_ancestor_mask: torch.Tensor) -> torch.Tensor:
    """[..., W] int64 -> [..., 64 * W] bool."""
    bits = (packed_ancestor_mask.unsqueeze(-1) >> torch.arange(64)) & 1
    return bits.bool().flatten(-2)


def pack_ancestor_mask(ancestor_mask: torch.Tensor) -> torch.Tensor:
    """[..., T] bool -> [..., ceil(T / 64)] int64."""
    num_rows = ancestor_mask.shape[-1]
    num_words = (num_rows + 63) // 64
    padded = torch.nn.functional.pad(ancestor_mask.long(), (0, 64 * num_words - num_rows))
    words = padded.unflatten(-1, (num_words, 64)) << torch.arange(64)
    return words.sum(-1)
