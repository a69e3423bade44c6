"""The published forwards of both drafters, stated plainly and apart from the engine: float64, dense attention over the whole sequence, config.json as it is written."""

from __future__ import annotations

import torch
from torch import Tensor


class PublishedDrafter:
    """raw: config.json; tensors under their published names; embedding [V, H]; head [V, H]: the target's, for EAGLE-1; window: pairs that attention reaches back, 0: all."""

    def __init__(self, raw: dict, tensors: dict[str, Tensor], embedding: Tensor, head: Tensor, window: int = 0) -> None:
        self.raw, self.window = raw, window
        self.w = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.head = self.w.get("lm_head.weight", head.double())
        self.is_eagle3 = "midlayer.hidden_norm.weight" in tensors

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def first_features(self, states: Tensor) -> Tensor:
        """states [n, 3 Ht] or [n, H] of the target -> what the layer takes for its tokens."""
        states = states.double()
        if not self.is_eagle3:
            return states
        if self.raw.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        if self.raw.get("fc_norm"):
            low, middle, high = states.tensor_split(3, dim=1)
            states = torch.cat((self.norm(low, "fc_norm.0"), self.norm(middle, "fc_norm.1"), self.norm(high, "fc_norm.2")), dim=1)
        return states @ self.w["fc.weight"].T

    def layer(self, tokens: list[int], features: Tensor) -> Tensor:
        """Pair i is (features[i], embedding of tokens[i]) at position i; the predicted feature after each."""
        raw, w, length = self.raw, self.w, len(tokens)
        heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        dim = raw.get("head_dim", raw["hidden_size"] // heads) if self.is_eagle3 else raw["hidden_size"] // heads
        embedded = self.embedding[tokens]
        prefix = "midlayer" if self.is_eagle3 else "layers.0"
        if self.is_eagle3:
            normed = self.norm(features, "midlayer.hidden_norm")
            x = torch.cat((self.norm(embedded, "midlayer.input_layernorm"), normed), dim=1)
            stream = normed if raw.get("norm_before_residual") else features
        else:
            stream = torch.cat((embedded, features), dim=1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
            x = stream

        def heads_of(name: str) -> Tensor:
            return (x @ w[f"{prefix}.self_attn.{name}_proj.weight"].T + w.get(f"{prefix}.self_attn.{name}_proj.bias", 0.0)).view(length, -1, dim)

        q, k, v = heads_of("q"), heads_of("k"), heads_of("v")
        frequencies = raw.get("rope_theta", 10000.0) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        turns = torch.polar(torch.ones(length, dim // 2, dtype=torch.float64), torch.arange(length)[:, None] * frequencies)[:, None]

        def turned(y: Tensor) -> Tensor:
            pairs = torch.complex(y[..., : dim // 2], y[..., dim // 2 :]) * turns
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        q, k = turned(q), turned(k)
        out = torch.zeros(length, heads, dim, dtype=torch.float64)
        for i in range(length):
            first = max(0, i + 1 - self.window) if self.window else 0
            for h in range(heads):
                kv = h // (heads // kv_heads)
                weights = torch.softmax(k[first : i + 1, kv] @ q[i, h] / dim**0.5, dim=0)
                out[i, h] = weights @ v[first : i + 1, kv]
        stream = stream + out.view(length, -1) @ w[f"{prefix}.self_attn.o_proj.weight"].T
        y = self.norm(stream, f"{prefix}.post_attention_layernorm")
        gate, up = (y @ w[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        stream = stream + (gate * torch.sigmoid(gate) * up) @ w[f"{prefix}.mlp.down_proj.weight"].T
        return self.norm(stream, "norm") if raw.get("norm_output") else stream

    def run(self, tokens: list[int], states: Tensor) -> Tensor:
        """Features [n, H] of a sequence of pairs: the first len(states) take the target's states, each later one the feature predicted before it."""
        features = self.first_features(states)
        while True:
            out = self.layer(tokens[: len(features)], features)
            if len(features) == len(tokens):
                return out
            features = torch.cat((features, out[-1:]))

    def logits(self, features: Tensor) -> Tensor:
        """Over the draft vocabulary."""
        if self.is_eagle3 and not self.raw.get("norm_output"):
            features = self.norm(features, "norm")
        return features @ self.head.T
