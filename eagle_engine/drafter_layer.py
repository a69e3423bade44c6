"""The arithmetic of both drafters, stated once: decoding runs it on the kernels of eagle_kernels, training on differentiable torch.

EAGLE-1 and EAGLE-2: Li et al., 2024a, 2024b. EAGLE-3: Li et al., 2025. Both predict a feature from the pair (feature of token i, embedding of token i + 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from eagle_engine.drafter_config import NUM_CAPTURED, DrafterConfig

# q [..., heads, head_dim], k and v [..., kv_heads, head_dim], before rotary embedding -> [..., heads * head_dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DrafterOps(Protocol):
    """What the two sides do in their own way. Weights go by the published names, without ".weight"; activations are [..., channels]."""

    def linear(self, x: Tensor, *names: str) -> Tensor:
        """x times the rows of the named weights, one after the other, plus their biases where the drafter has them."""

    def rms_norm(self, x: Tensor, name: str) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, name: str, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual + x, and its norm; residual may be overwritten."""

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...


def fuse(ops: DrafterOps, config: DrafterConfig, states: Tensor) -> Tensor:
    """What the target hands over for a token, [..., fused_size], as the feature that the layer takes, [..., H].

    EAGLE-1/2: it is the target's feature already. EAGLE-3: fc(low, middle, high); 3.1 normalises the three, each for itself or together.
    """
    if config.version == 1:
        return states
    if config.norm_before_fc:
        states = ops.rms_norm(states, "input_norm")
    if config.fc_norm:
        chunks = states.chunk(NUM_CAPTURED, dim=-1)
        states = torch.cat([ops.rms_norm(chunk.contiguous(), f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
    return ops.linear(states, "fc")


def draft_layer(ops: DrafterOps, config: DrafterConfig, embedded: Tensor, features: Tensor, attend: Attend) -> Tensor:
    """embedded, features [..., H], the pair -> the predicted feature [..., H], which is also what the next level is fed with.

    EAGLE-1/2   hidden = fc(embedded, feature)                  no norm before attention, since the feature is normalised already
    EAGLE-3     x = norm(embedded), norm(feature)               attention is 2 H wide; the residual is the feature as it came (norm_before_residual: normalised)
    both        hidden + attention, then + mlp(norm(hidden));   EAGLE-3 with norm_output: its final norm
    """
    prefix = config.prefix
    x, residual = layer_input(ops, config, embedded, features)
    hidden, x = ops.add_rms_norm(ops.linear(attend(*queries_keys_values(ops, config, x)), prefix + "self_attn.o_proj"), prefix + "post_attention_layernorm", residual)
    gate_up = ops.linear(x, prefix + "mlp.gate_proj", prefix + "mlp.up_proj")
    hidden = hidden + ops.linear(ops.silu_mul(gate_up), prefix + "mlp.down_proj")
    return ops.rms_norm(hidden, "norm") if config.norm_output else hidden


def layer_input(ops: DrafterOps, config: DrafterConfig, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """What attention takes, and the residual."""
    if config.version == 1:
        x = ops.linear(torch.cat((embedded, features), dim=-1), "fc")
        return x, x
    normed = ops.rms_norm(features, config.prefix + "hidden_norm")
    x = torch.cat((ops.rms_norm(embedded, config.prefix + "input_layernorm"), normed), dim=-1)
    return x, normed if config.norm_before_residual else features


def queries_keys_values(ops: DrafterOps, config: DrafterConfig, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., heads, head_dim], k and v [..., kv_heads, head_dim], before rotary embedding."""
    c = config.layer
    qkv = ops.linear(x, *(f"{config.prefix}self_attn.{name}_proj" for name in "qkv")).unflatten(-1, (-1, c.head_dim))
    return qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=-2)


def keys_values(ops: DrafterOps, config: DrafterConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """As queries_keys_values, without the queries."""
    c = config.layer
    kv = ops.linear(x, *(f"{config.prefix}self_attn.{name}_proj" for name in "kv")).unflatten(-1, (-1, c.head_dim))
    return kv.split(c.num_kv_heads, dim=-2)


def head_input(ops: DrafterOps, config: DrafterConfig, features: Tensor) -> Tensor:
    """What the head is applied to: the feature of EAGLE-1/2 and with norm_output, its norm otherwise."""
    return ops.rms_norm(features, "norm") if config.version == 3 and not config.norm_output else features
