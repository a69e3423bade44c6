"""Tables of rotary position embeddings."""

from __future__ import annotations

import math

import torch

from eagle_engine.model_config import ModelConfig

# Rows per block. Each block is computed alone, so that a row's bits do not depend on how many rows the table has
# (vectorised sine and cosine may round differently in the remainder of a loop).
_BLOCK = 64


def rope_inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angle per position of each pair of channels: [head_dim / 2] float64.

    default        f = rope_theta ^ (-2 j / head_dim)
    linear         f / factor
    llama3         wavelength 2 pi / f; n = original_max_position_embeddings
                   wavelength < n / high_freq_factor: f;  wavelength > n / low_freq_factor: f / factor;
                   between: (1 - s) * f / factor + s * f  with  s = (n / wavelength - low) / (high - low)
    freq_factors   f / factors[j]
    """
    half = config.head_dim // 2
    base = [config.rope_theta ** (-2.0 * j / config.head_dim) for j in range(half)]
    scaling = config.rope_scaling or {"rope_type": "default"}
    rope_type = scaling["rope_type"]
    if rope_type == "linear":
        base = [f / scaling["factor"] for f in base]
    elif rope_type == "freq_factors":
        base = [f / factor for f, factor in zip(base, scaling["factors"])]
    elif rope_type == "llama3":
        base = [_llama3_frequency(f, scaling) for f in base]
    return torch.tensor(base, dtype=torch.float64)


def _llama3_frequency(frequency: float, scaling: dict) -> float:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2.0 * math.pi)
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1.0 - smooth) * frequency / scaling["factor"] + smooth * frequency


def rope_table(config: ModelConfig, max_positions: int) -> torch.Tensor:
    """cat(cos, sin) of every position: [max_positions, head_dim] float32, computed in float64 and rounded once."""
    frequencies = rope_inverse_frequencies(config)
    table = torch.empty(max_positions, config.head_dim, dtype=torch.float32)
    for start in range(0, max_positions, _BLOCK):
        angles = torch.arange(start, start + _BLOCK, dtype=torch.float64)[:, None] * frequencies
        rows = torch.cat((angles.cos(), angles.sin()), dim=1).float()
        table[start : start + _BLOCK] = rows[: max_positions - start]
    return table
