"""Tiny random targets of every family: as `transformers` models, Hugging Face directories, GGUF files; and their caches."""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np
import torch
from helpers import PagedCache, make_paged_cache

VOCAB_SIZE = 83  # not a multiple of 16
_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# case -> (family, options of its transformers config)
CASES = {
    "llama": ("Llama", {}),
    "llama-tied-biases-linear": (
        "Llama",
        dict(
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
    ),
    "llama-llama3-rope-head-dim": ("Llama", dict(rope_parameters=_LLAMA3_ROPE, head_dim=16)),
    "llama-mha": ("Llama", dict(num_key_value_heads=4)),
    "mistral-window": ("Mistral", dict(sliding_window=7)),
    "mistral-no-window": ("Mistral", dict(sliding_window=None)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("Qwen2", dict(use_sliding_window=False, sliding_window=5)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=0)),
    "qwen3-tied": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-biases": ("Qwen3", dict(head_dim=10, attention_bias=True)),
}


def tiny_model(case: str, **options):
    """The `transformers` model of a case: float32, every tensor random (norms and biases too), seeded by the case's name."""
    import transformers

    family, family_options = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(_COMMON | family_options | options))
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(zlib.crc32(case.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model


def save_directory(directory: Path, case: str, max_shard_size: str = "1GB", **options):
    """Write the case as a Hugging Face directory; the model."""
    model = tiny_model(case, **options)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def hf_logits(model, token_ids: list[int]) -> torch.Tensor:
    """[tokens, V] float32."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def random_tokens(seed: int, count: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def empty_cache(
    config, batch: int = 1, rows: int = 64, page_size: int = 4, dtype: torch.dtype = torch.float32
) -> PagedCache:
    """A paged cache of all layers without committed rows, every value NaN; seq_lens is the caller's to advance."""
    cache = make_paged_cache(
        [0] * batch, rows, page_size, config.num_kv_heads, config.head_dim, dtype=dtype, layers=config.num_layers
    )
    cache.kv.fill_(float("nan"))
    return cache


def prefill(target, cache: PagedCache, token_ids: list[int], chunk: int | None = None) -> torch.Tensor:
    """Features [tokens, H] of one sequence, run in chunks of `chunk` tokens (default all at once)."""
    features = []
    for start in range(0, len(token_ids), chunk or len(token_ids)):
        tokens = torch.tensor([token_ids[start : start + (chunk or len(token_ids))]])
        positions = torch.arange(start, start + tokens.shape[1])[None]
        features.append(target.forward(tokens, positions, cache.kv, cache.seq_lens, cache.page_table)[0])
        cache.seq_lens.add_(tokens.shape[1])
    return torch.cat(features)


def gguf_tensors(model) -> dict[str, np.ndarray]:
    """The model's tensors as llama.cpp names and lays them out: q and k rows interleaved for llama, Mixtral experts stacked."""
    config = model.config
    architecture = gguf_architecture(model)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            num_heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            array = (
                array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
                .swapaxes(1, 2)
                .reshape(array.shape)
            )
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            tensors[f"blk.{layer}.ffn_gate_exps.weight"], tensors[f"blk.{layer}.ffn_up_exps.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            tensors[f"blk.{layer}.ffn_down_exps.weight"] = array
        elif name.endswith("mlp.gate.weight"):
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = array
        else:
            tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return tensors


def gguf_architecture(model) -> str:
    return {"qwen2": "qwen2", "qwen3": "qwen3"}.get(model.config.model_type, "llama")


def write_gguf(
    path: Path,
    model,
    quantise=None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    edit=None,
    metadata: dict | None = None,
) -> Path:
    """Write a model as GGUF.

    quantise       (name, array) -> (array as stored, GGMLQuantizationType); default float32
    extra_tensors  added after the model's own
    edit           called with the dict of tensors before they are written
    metadata       key -> str, int, float, bool or list, added to or replacing the model's own
    """
    config, architecture = model.config, gguf_architecture(model)
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config.model_type == "mixtral":
        keys |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    fields = {f"{architecture}.{key}": value for key, value in keys.items()}
    fields |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2} | (metadata or {})
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", architecture))
    for key, value in fields.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    tensors = gguf_tensors(model) | (extra_tensors or {})
    if edit is not None:
        edit(tensors)
    for name, array in tensors.items():
        stored, kind = (
            (array, gguf.GGMLQuantizationType.F32) if quantise is None or array.ndim == 1 else quantise(name, array)
        )
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
