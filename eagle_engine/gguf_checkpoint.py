"""GGUF files as target checkpoints: metadata to ModelConfig, tensor names and layouts to those of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle_engine.checkpoint import Checkpoint, check_tensors, expected_tensors
from eagle_engine.errors import EagleError
from eagle_engine.gguf_file import GgufFile
from eagle_engine.model_config import ModelConfig, token_id_tuple

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # "llama" is also what Mistral and Mixtral files say
ROPE_FACTORS = "rope_freqs.weight"
_UNSUPPORTED_KEYS = ("logit_scale", "embedding_scale", "residual_scale", "attention.scale", "expert_shared_count")
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>")

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT_NAMES = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of one of the supported families."""
    file = GgufFile(path)
    try:
        config = gguf_config(file)
    except EagleError as error:
        raise EagleError(f"{path}: {error}") from error
    expected = expected_tensors(config)
    stacked = any(name.endswith("_exps.weight") for name in file.tensors)
    # Hugging Face name -> (GGUF name, index in a stacked expert tensor or None)
    sources = {name: _gguf_name(name, stacked) for name in expected}
    found = {name: tensor.shape for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
    wanted = {
        source: _stacked_shape(config, shape, index)
        for (source, index), shape in zip(sources.values(), expected.values())
    }
    check_tensors(path, wanted, found)
    # For this architecture llama.cpp interleaves the rows of each rotary pair in q and k, which Hugging Face keeps
    # half a head apart.
    reordered = file.metadata["general.architecture"] == "llama"

    def read(name: str) -> torch.Tensor:
        tensor = file.read(*sources[name])
        if reordered and ".self_attn.q_proj." in name:
            return undo_rotary_permutation(tensor, config.num_heads)
        if reordered and ".self_attn.k_proj." in name:
            return undo_rotary_permutation(tensor, config.num_kv_heads)
        return tensor

    return Checkpoint(path, config, expected, read, file.metadata)


def undo_rotary_permutation(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (pair j, half h) of each head to rows (half h, pair j): [heads * head_dim, ...], same shape."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(tensor.shape)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The ModelConfig that the metadata and the tensor directory describe."""
    metadata, tensors = file.metadata, file.tensors
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise EagleError(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)} "
            "(llama includes Mistral and Mixtral)"
        )
    if metadata.get("split.count", 1) > 1:
        raise EagleError("split GGUF files are not supported; merge the parts first (llama-gguf-split --merge)")
    for key in _UNSUPPORTED_KEYS:
        if metadata.get(f"{name}.{key}"):
            raise EagleError(f"metadata {name}.{key} = {metadata[f'{name}.{key}']} is not supported")
    if "token_embd.weight" not in tensors:
        raise EagleError("missing tensor token_embd.weight")

    def field(key: str, default: float | None = None, kind: type = int) -> Any:
        value = metadata.get(f"{name}.{key}", default)
        if value is None:
            raise EagleError(f"metadata has no {name}.{key}")
        if not isinstance(value, kind):
            raise EagleError(f"metadata {name}.{key} must be one {kind.__name__} for all layers, got {value!r}")
        return value

    hidden_size, num_heads = field("embedding_length"), field("attention.head_count")
    if num_heads < 1:
        raise EagleError(f"metadata {name}.attention.head_count must be positive, got {num_heads}")
    head_dim = field("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if field(key, head_dim) != head_dim:
            raise EagleError(
                f"metadata {name}.{key} = {field(key)} differs from head_dim {head_dim}, which is not supported"
            )
    num_experts = field("expert_count", 0)
    if num_experts and name != "llama":
        raise EagleError(f"experts are not supported for architecture {name}")
    types = {tensor.quantisation.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return ModelConfig(
        architecture="mixtral" if num_experts else name,
        hidden_size=hidden_size,
        intermediate_size=field("feed_forward_length"),
        num_layers=field("block_count"),
        num_heads=num_heads,
        num_kv_heads=field("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=tensors["token_embd.weight"].shape[0],
        rms_norm_eps=field("attention.layer_norm_rms_epsilon", kind=float),
        rope_theta=field("rope.freq_base", 10_000.0, float),
        rope_scaling=_rope_scaling(file, name),
        max_position_embeddings=field("context_length"),
        sliding_window=field("attention.sliding_window", 0),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        num_experts=num_experts,
        num_experts_per_token=field("expert_used_count", 0),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata),
        dtype={frozenset({"F16"}): "float16", frozenset({"BF16"}): "bfloat16"}.get(frozenset(types), "float32"),
    )


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise EagleError(f"rope scaling {scaling!r} is not supported; supported are none, linear and {ROPE_FACTORS}")
    factor = float(file.metadata.get(f"{architecture}.rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0
    if ROPE_FACTORS in file.tensors:
        factors = [value * factor for value in file.read(ROPE_FACTORS).double().flatten().tolist()]
        return {"rope_type": "freq_factors", "factors": factors}
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def _eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Declared end tokens, and the token that ends a turn in the chat template: older files name only the end of a text."""
    ids = [i for key in ("eos", "eot", "eom") for i in token_id_tuple(metadata.get(f"tokenizer.ggml.{key}_token_id"))]
    template, tokens = metadata.get("tokenizer.chat_template", ""), metadata.get("tokenizer.ggml.tokens", [])
    ids += [tokens.index(turn_end) for turn_end in _TURN_ENDS if turn_end in template and turn_end in tokens]
    return tuple(dict.fromkeys(ids))


def _gguf_name(name: str, stacked_experts: bool) -> tuple[str, int | None]:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight", None
    if name == "model.norm.weight":
        return "output_norm.weight", None
    if name == "lm_head.weight":
        return "output.weight", None
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    if ".experts." in name:
        _, _, expert, matrix = module.split(".")
        if stacked_experts:
            return f"blk.{layer}.{_EXPERT_NAMES[matrix]}_exps.{kind}", int(expert)
        return f"blk.{layer}.{_EXPERT_NAMES[matrix]}.{expert}.{kind}", None
    return f"blk.{layer}.{_NAMES[module]}.{kind}", None


def _stacked_shape(config: ModelConfig, shape: tuple[int, ...], index: int | None) -> tuple[int, ...]:
    return shape if index is None else (config.num_experts, *shape)
