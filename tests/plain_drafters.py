"""The published drafters, stated plainly and apart from the library: one sequence, dense attention, float64. Names of weights as published."""

from __future__ import annotations

import torch
from torch import Tensor


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [n, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_layer(weights: dict[str, Tensor], config, embedded: Tensor, features: Tensor) -> Tensor:
    """embedded, features [n, H] of the pairs 0..n-1, at rotary positions 0..n-1 -> predicted features [n, H], causal."""
    w = {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}
    c, eps = config.layer, config.layer.rms_norm_eps
    embedded, features = embedded.double(), features.double()
    if config.version == 1:
        layer = "layers.0."
        x = torch.cat((embedded, features), -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        residual = x
    else:
        layer = "midlayer."
        normed = _norm(features, w[layer + "hidden_norm.weight"], eps)
        x = torch.cat((_norm(embedded, w[layer + "input_layernorm.weight"], eps), normed), -1)
        residual = normed if config.norm_before_residual else features
    n, group = len(x), c.num_heads // c.num_kv_heads
    q, k, v = ((x @ w[f"{layer}self_attn.{p}_proj.weight"].T + w.get(f"{layer}self_attn.{p}_proj.bias", 0.0)).view(n, -1, c.head_dim) for p in "qkv")
    positions = torch.arange(n)
    q, k = _rope(q, positions, c.rope_theta), _rope(k, positions, c.rope_theta).repeat_interleave(group, 1)
    v = v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
    scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
    hidden = residual + attended @ w[layer + "self_attn.o_proj.weight"].T
    x = _norm(hidden, w[layer + "post_attention_layernorm.weight"], eps)
    gate, up = x @ w[layer + "mlp.gate_proj.weight"].T, x @ w[layer + "mlp.up_proj.weight"].T
    hidden = hidden + (gate * gate.sigmoid() * up) @ w[layer + "mlp.down_proj.weight"].T
    return _norm(hidden, w["norm.weight"], eps) if config.norm_output else hidden


def plain_fuse(weights: dict[str, Tensor], config, states: Tensor) -> Tensor:
    """What the target hands over [n, fused_size] -> features [n, H]."""
    if config.version == 1:
        return states.double()
    states, size, eps = states.double(), config.target_hidden_size, config.layer.rms_norm_eps
    if config.norm_before_fc:
        states = _norm(states, weights["input_norm.weight"].double(), eps)
    if config.fc_norm:
        states = torch.cat([_norm(states[:, i * size : (i + 1) * size], weights[f"fc_norm.{i}.weight"].double(), eps) for i in range(3)], -1)
    return states @ weights["fc.weight"].double().T


def plain_logits(weights: dict[str, Tensor], config, features: Tensor, target_head: Tensor) -> Tensor:
    """features [n, H] -> logits over the draft vocabulary; target_head: the target's rows that EAGLE-1/2 uses."""
    if config.version == 1:
        return features.double() @ target_head.double().T
    x = features.double() if config.norm_output else _norm(features.double(), weights["norm.weight"].double(), config.layer.rms_norm_eps)
    return x @ weights["lm_head.weight"].double().T


def plain_draft(weights: dict[str, Tensor], config, embedding: Tensor, tokens: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """Draft `steps` levels after the last of n true states: tokens [n + steps], states [n, fused_size]; predicted feature of each level, [H]. The drafter is run on the whole sequence at every level."""
    features = plain_fuse(weights, config, states)
    predicted = []
    for _ in range(steps):
        n = len(features)
        last = plain_layer(weights, config, embedding[tokens[1 : n + 1]], features)[-1]
        predicted.append(last)
        features = torch.cat((features, last[None]))
    return predicted
