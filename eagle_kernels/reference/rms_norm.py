"""Reference of rms_norm."""

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, with the residual add that comes before it.

    x         [..., H]; computed in its dtype
    weight    [H]
    residual  [..., H]   modified: residual += x, and the norm is that of the new residual
    returns   [..., H]

    y = weight * (h * rsqrt(mean(h * h) + eps)),  h = x or residual + x
    """
    hidden = x
    if residual is not None:
        residual += x
        hidden = residual
    y = weight * (hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + eps))
    return y if out is None else out.copy_(y)
