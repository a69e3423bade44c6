"""The drafter as a differentiable module: the same arithmetic as in decoding (`drafter_layer`), on torch's own operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.drafter_layer import draft_layer, fuse, head_input
from eagle_engine.rope import rope_table

_MAPS = ("d2t", "t2d")


class TrainableDrafter(nn.Module):
    """Weights by their published names, in float32, and the forward that training differentiates. Implements `drafter_layer.DrafterOps`.

    weight_dtype  what the weights will be stored in; the forward uses them rounded to it, so that what is exported is what was trained. Gradients pass the rounding unchanged
    """

    def __init__(self, config: DrafterConfig, weight_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.weight_dtype = config, weight_dtype
        shapes = {name: shape for name, shape in config.expected_tensors().items() if name not in _MAPS}
        self._prepared: dict[str, Tensor] = {}
        # ParameterDict takes no dots in names.
        self.weights = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Published name -> parameter."""
        return {name.replace("/", "."): parameter for name, parameter in self.weights.items()}

    def prepare(self) -> None:
        """Round the weights for the forwards that follow, up to the next call: once for all unrolled steps."""
        dtype = torch.get_autocast_dtype(self._device_type()) if torch.is_autocast_enabled(self._device_type()) else torch.float32
        self._prepared = {
            name: _Rounded.apply(weight, stored_dtype(weight, self.weight_dtype), dtype if weight.dim() > 1 else torch.float32) for name, weight in self.named_weights().items()
        }

    def _device_type(self) -> str:
        return next(self.parameters()).device.type

    def linear(self, x: Tensor, *names: str) -> Tensor:
        weights = self._prepared
        bias = torch.cat([weights[f"{name}.bias"] for name in names]) if f"{names[0]}.bias" in weights else None
        return F.linear(x, torch.cat([weights[f"{name}.weight"] for name in names]) if len(names) > 1 else weights[f"{names[0]}.weight"], bias)

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._prepared[f"{name}.weight"]
        return F.rms_norm(x.float(), weight.shape, weight, self.config.layer.rms_norm_eps)

    def add_rms_norm(self, x: Tensor, name: str, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, self.rms_norm(total, name)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def embed(self, token_ids: Tensor, target_embedding: Tensor) -> Tensor:
        """Its own embedding where it has one, the target's otherwise."""
        return F.embedding(token_ids, self._prepared.get("embed_tokens.weight", target_embedding)).float()

    def fuse(self, states: Tensor) -> Tensor:
        return fuse(self, self.config, states)

    def layer(self, embedded: Tensor, features: Tensor, attend) -> Tensor:
        return draft_layer(self, self.config, embedded, features, attend)

    def logits(self, features: Tensor, target_head: Tensor) -> Tensor:
        """features [..., H] -> [..., Vd]; target_head [Vd, H]: the target's rows of the draft vocabulary, which EAGLE-1/2 uses."""
        x = head_input(self, self.config, features)
        return F.linear(x, target_head) if self.config.version == 1 else self.linear(x, "lm_head")


def stored_dtype(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What a weight is stored in: norms and biases, which are small, in 16 bits at least."""
    return dtype if weight.dim() > 1 or dtype.itemsize > 1 else torch.float16


class _Rounded(torch.autograd.Function):
    """A weight rounded to the dtype that it is stored in, for products in another; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, weight: Tensor, stored: torch.dtype, product: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.to(stored).to(product) if stored != torch.float32 else weight.to(product, copy=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None


@torch.no_grad()
def initialise(model: TrainableDrafter, seed: int, target_norm: Tensor | None = None, target_head: Tensor | None = None) -> None:
    """Start as a drafter that changes little: `fc` passes on the feature (EAGLE-3: the highest captured state) with a tenth of a random matrix beside, and the two blocks add zero.

    target_norm, target_head  [H], [Vd, H]: EAGLE-3 starts with the target's final norm and the rows of its head when they are as wide as the drafter; else its head is random
    """
    generator = torch.Generator().manual_seed(seed)
    c = model.config
    hidden = c.layer.hidden_size
    for name, weight in model.named_weights().items():
        if "norm" in name:
            weight.fill_(1.0)
        elif name.endswith(".bias") or name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        else:
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    fc = model.named_weights()["fc.weight"]
    fc *= 0.1
    if c.target_hidden_size == hidden:
        fc[:, -hidden:] += torch.eye(hidden)
    if c.version == 3 and target_head is not None and target_head.shape[1] == hidden:
        model.named_weights()["lm_head.weight"].copy_(target_head)
        model.named_weights()["norm.weight"].copy_(target_norm)


class UnrolledAttention:
    """Attention of the unrolled drafter (training-time test; Li et al., 2025): at step i, the query of row t sees the keys of step 0 up to row t, and row t alone of the steps 1..i.

    Row t of step i is the pair that stands i places after row t of step 0, so its rotary position is position_ids + i.

    mask          [B, L, L] bool, which keys of step 0 a row sees: its own conversation's, up to itself
    position_ids  [B, L] int64
    """

    def __init__(self, config: DrafterConfig, mask: Tensor, position_ids: Tensor, steps: int) -> None:
        c = self._layer = config.layer
        self._bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))[:, None, None]
        self._table = rope_table(c, int(position_ids.max()) + steps + 1).to(mask.device)
        self._position_ids = position_ids
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One step: q [B, L, heads, head_dim], k and v [B, L, kv_heads, head_dim] -> [B, L, heads * head_dim]. The steps are counted by the calls."""
        c, step = self._layer, len(self._keys)
        batch, length = q.shape[:2]
        cos, sin = self._table[self._position_ids + step][:, :, None].chunk(2, dim=-1)
        # [B, kv_heads, group, L, D]; keys and values without the group.
        q = _rotate(q, cos, sin).unflatten(2, (c.num_kv_heads, -1)).permute(0, 2, 3, 1, 4) * c.head_dim**-0.5
        self._keys.append(_rotate(k, cos, sin).transpose(1, 2))
        self._values.append(v.transpose(1, 2))
        group = q.shape[2]
        scores = torch.matmul(q.flatten(2, 3), self._keys[0].transpose(-1, -2)).unflatten(2, (group, length)).float() + self._bias
        later = [(q * key[:, :, None]).sum(-1, keepdim=True).float() for key in self._keys[1:]]
        probs = torch.cat((scores, *later), dim=-1).softmax(-1).to(v.dtype)
        out = torch.matmul(probs[..., :length].flatten(2, 3), self._values[0]).unflatten(2, (group, length))
        for i, value in enumerate(self._values[1:]):
            out = out + probs[..., length + i, None] * value[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(batch, length, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, L, heads, D]: channel j pairs with j + D / 2. cos, sin [B, L, 1, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
