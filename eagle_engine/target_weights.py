"""From a checkpoint to the packed weights of TargetModel: q, k, v in one matrix, gate and up in one matrix."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from eagle_engine.checkpoint import Checkpoint
from eagle_engine.model_config import ModelConfig
from eagle_engine.weight_cache import load_or_build
from eagle_kernels.linear import pack_weight

CPU = torch.device("cpu")
_FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_EXPERT_MATRICES = {"gate_up": ("w1", "w3"), "down": ("w2",)}


def packed_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of each kind of packed weight."""
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    return {
        "embedding": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "qkv": (q_size + 2 * config.num_kv_heads * config.head_dim, hidden),
        "o": (hidden, q_size),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "router": (config.num_experts, hidden),
    }


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: bool = True, cache_directory: Path | None = None, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Name -> tensor: packed data for the names of `packed_shapes`, float32 vectors for norms and biases.

    Names are "embedding", "head" (when not tied), "final_norm" and "layers.<i>.<field of target.Layer>".
    """
    device = torch.device(device)
    if device.type != "cpu":
        return _pack(checkpoint, dtype, progress, "rows", device)
    if checkpoint.gguf_metadata is None:
        return _pack(checkpoint, dtype, progress)
    variant = f"{str(dtype).removeprefix('torch.')}-{_layout_fingerprint(dtype)}"
    return load_or_build(checkpoint.path, variant, lambda: _pack(checkpoint, dtype, progress), cache_directory)


def _layout_fingerprint(dtype: torch.dtype) -> str:
    """Changes when pack_weight lays weights out differently, so that a cache of another version is never read."""
    packed = pack_weight(torch.arange(33 * 41, dtype=torch.float32).view(33, 41).to(dtype))
    return f"{zlib.crc32(packed.data.reshape(-1).view(torch.uint8).numpy()):08x}"


def _pack(checkpoint: Checkpoint, dtype: torch.dtype, progress: bool, layout: str = "panels", device: torch.device = CPU) -> dict[str, torch.Tensor]:
    config = checkpoint.config
    weights: dict[str, torch.Tensor] = {}

    def pack(names: Iterable[str]) -> torch.Tensor:
        rows = [checkpoint.tensor(name).to(dtype) for name in names]
        return pack_weight(rows[0] if len(rows) == 1 else torch.cat(rows), layout).data.to(device)

    def vector(*names: str) -> torch.Tensor:
        return torch.cat([checkpoint.tensor(name).float() for name in names]).to(device)

    bar = tqdm(
        total=config.num_layers + 1,
        desc=f"loading {checkpoint.path.name}",
        unit="layer",
        disable=not progress,
        leave=False,
    )
    with bar:
        weights["embedding"] = pack(["model.embed_tokens.weight"])
        if not config.tie_word_embeddings:
            weights["head"] = pack(["lm_head.weight"])
        weights["final_norm"] = vector("model.norm.weight")
        bar.update()
        for i in range(config.num_layers):
            layer, source = f"layers.{i}.", f"model.layers.{i}."
            weights[layer + "attention_norm"] = vector(source + "input_layernorm.weight")
            weights[layer + "mlp_norm"] = vector(source + "post_attention_layernorm.weight")
            if config.qk_norm:
                weights[layer + "q_norm"] = vector(source + "self_attn.q_norm.weight")
                weights[layer + "k_norm"] = vector(source + "self_attn.k_norm.weight")
            has_bias = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
            for kind, modules in _FUSED.items():
                if config.num_experts and kind in _EXPERT_MATRICES:
                    continue
                block = source + ("self_attn." if kind in ("qkv", "o") else "mlp.")
                weights[layer + kind] = pack(f"{block}{module}.weight" for module in modules)
                if has_bias[kind]:
                    weights[f"{layer}{kind}_bias"] = vector(*(f"{block}{module}.bias" for module in modules))
            if config.num_experts:
                block = source + "block_sparse_moe."
                weights[layer + "router"] = pack([block + "gate.weight"])
                for kind, matrices in _EXPERT_MATRICES.items():
                    for e in range(config.num_experts):
                        packed = pack(f"{block}experts.{e}.{matrix}.weight" for matrix in matrices)
                        if e == 0:
                            weights[layer + kind] = packed.new_empty(config.num_experts, *packed.shape)
                        weights[layer + kind][e] = packed
            bar.update()
    return weights
