"""The gated activation of a decoder layer's MLP."""

from torch import Tensor

from eagle_kernels._extension import OPS


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """y = silu(gate) * up.

    gate_up  [..., 2 I] fp32 (CUDA: bf16 or fp16): gate, then up; last dimension contiguous
    returns  [..., I], gate_up's dtype
    """
    size = gate_up.shape[-1] // 2
    if out is None:
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
    if gate_up.dim() == 2:
        OPS.silu_mul(gate_up, out)
    else:
        OPS.silu_mul(gate_up.view(-1, gate_up.shape[-1]), out.view(-1, size))
    return out
