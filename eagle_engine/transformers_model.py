"""A target as a model of `transformers`: what speed is compared with, and what the trainer takes states from."""

from __future__ import annotations

import torch

from eagle_engine.checkpoint import Checkpoint
from eagle_engine.rope import rope_inverse_frequencies


def load_model(checkpoint: Checkpoint, dtype: torch.dtype):
    """The checkpoint, a directory or a GGUF file, as a causal model of transformers on the CPU, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    c = checkpoint.config
    fields = dict(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_bias=c.qkv_bias,
        mlp_bias=c.mlp_bias,
        sliding_window=c.sliding_window or None,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    if c.architecture.startswith("qwen"):
        fields |= dict(use_sliding_window=c.sliding_window > 0, max_window_layers=0)
    if c.num_experts:
        fields |= dict(num_local_experts=c.num_experts, num_experts_per_tok=c.num_experts_per_token)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(c.architecture, **fields), dtype=dtype)
    tensors = _stack_experts({name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names()}, c.num_layers, c.num_experts)
    if c.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    # Covers every kind of RoPE scaling: the frequencies are ours, the tables are made from them.
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq = rope_inverse_frequencies(c).float()
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    return model.eval()


def _stack_experts(tensors: dict, num_layers: int, num_experts: int) -> dict:
    """Mixtral's experts as transformers holds them: all of a layer in one tensor."""
    if not num_experts:
        return tensors
    for i in range(num_layers):
        old, new = f"model.layers.{i}.block_sparse_moe.", f"model.layers.{i}.mlp."
        w1, w2, w3 = ([tensors.pop(f"{old}experts.{e}.{name}.weight") for e in range(num_experts)] for name in ("w1", "w2", "w3"))
        tensors[new + "experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3)])
        tensors[new + "experts.down_proj"] = torch.stack(w2)
        tensors[new + "gate.weight"] = tensors.pop(old + "gate.weight")
    return tensors
