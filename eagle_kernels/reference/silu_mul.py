"""Reference of silu_mul."""

import torch


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up.

    gate_up  [..., 2 * I] = cat(gate, up); computed in its dtype
    returns  [..., I]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    y = gate / (1 + torch.exp(-gate)) * up
    return y if out is None else out.copy_(y)
