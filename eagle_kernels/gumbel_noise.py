"""Counter-based noise, the same bits on every backend."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS


def gumbel_noise(seeds: Tensor, positions: Tensor, num_tokens: int, *, stream: int = 0) -> Tensor:
    """Gumbel(0, 1) noise of every token id, a pure function of (seed, position, token id, stream); Philox 4x32-10 (Salmon et al., SC 2011).

    seeds      [R] int64
    positions  [R] int64, absolute position of the token to be drawn
    stream     0 token sampling; 1 + 16 * lane draft children; 3 residual draw
    returns    [R, num_tokens] fp32
    """
    out = torch.empty(seeds.shape[0], num_tokens, dtype=torch.float32, device=seeds.device)
    OPS.noise(seeds, positions, stream, False, out)
    return out


def uniform_noise(seeds: Tensor, positions: Tensor, count: int, *, stream: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1), keyed as `gumbel_noise` is.

    seeds      [R] int64
    positions  [R] int64
    stream     2 acceptance coins
    returns    [R, count] fp32
    """
    out = torch.empty(seeds.shape[0], count, dtype=torch.float32, device=seeds.device)
    OPS.noise(seeds, positions, stream, True, out)
    return out
