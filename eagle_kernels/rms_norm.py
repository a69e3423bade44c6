"""Root-mean-square normalisation, with the residual addition of a decoder layer."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """y = weight * h / sqrt(mean(h^2) + eps), h = x, or residual += x when there is a residual.

    x         [R, H] or [R, heads, H] fp32 (CUDA: bf16 or fp16), last dimension contiguous; other leading shapes must be contiguous
    weight    [H] fp32
    residual  as x, contiguous, or None; modified
    returns   as x
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() in (2, 3):
        OPS.rms_norm(x, weight, eps, residual, out)
    else:
        size = x.shape[-1]
        OPS.rms_norm(x.view(-1, size), weight, eps, None if residual is None else residual.view(-1, size), out.view(-1, size))
    return out
