"""Target checkpoints: one view of a Hugging Face directory, a hub id or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_engine.errors import EagleError
from eagle_engine.model_config import ModelConfig


@dataclass(frozen=True)
class Checkpoint:
    """Configuration and tensors of a target, under their Hugging Face names whatever the format of the file.

    path       the directory or the .gguf file
    shapes     name -> shape of every tensor the configuration asks for; all are present and have that shape
    read       name -> tensor, read (and dequantised) at each call, so that the caller decides how much is in memory
    gguf_metadata   key -> value of a GGUF file, None for a directory
    """

    path: Path
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    gguf_metadata: dict | None = None

    def names(self) -> list[str]:
        return list(self.shapes)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, float32, bfloat16 or float16."""
        tensor = self.read(name)
        if tuple(tensor.shape) != self.shapes[name]:
            raise EagleError(
                f"{self.path}: tensor {name}: expected shape {list(self.shapes[name])}, got {list(tensor.shape)}"
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise EagleError(
                f"{self.path}: tensor {name} is {tensor.dtype}; only float32, bfloat16 and float16 are supported"
            )
        return tensor


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a directory with config.json and safetensors, a .gguf file, or a model of the Hugging Face hub ("owner/name").

    Only headers are read: a missing, unused or mis-shaped tensor, and a truncated file, are errors here.
    """
    from eagle_engine.gguf_checkpoint import open_gguf
    from eagle_engine.huggingface_checkpoint import download_from_hub, open_directory

    path = Path(source).expanduser()
    if path.is_dir():
        return open_directory(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return open_gguf(path)
        raise EagleError(f"{path}: expected a .gguf file, or a directory with config.json and safetensors")
    if _looks_like_path(str(source)):
        raise EagleError(f"{path}: no such file or directory")
    return open_directory(download_from_hub(str(source)))


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.endswith(".gguf") or source.count("/") != 1


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of a model with this configuration, in the order of the forward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            shapes[f"{layer}self_attn.{name}.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, q_size)
        if config.o_bias:
            shapes[layer + "self_attn.o_proj.bias"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if config.num_experts:
            shapes[layer + "block_sparse_moe.gate.weight"] = (config.num_experts, hidden)
            for e in range(config.num_experts):
                expert = f"{layer}block_sparse_moe.experts.{e}."
                shapes |= {
                    expert + "w1.weight": (inner, hidden),
                    expert + "w3.weight": (inner, hidden),
                    expert + "w2.weight": (hidden, inner),
                }
            continue
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            shapes[f"{layer}mlp.{name}.weight"] = shape
            if config.mlp_bias:
                shapes[f"{layer}mlp.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(path: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """Raise EagleError unless exactly the expected names are found, each with its shape."""
    for title, names in (("missing", expected.keys() - found.keys()), ("unused", found.keys() - expected.keys())):
        if names:
            first = sorted(names)[:5]
            rest = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
            hint = (
                "not part of a model with this configuration" if title == "unused" else "required by the configuration"
            )
            raise EagleError(f"{path}: {title} tensor{'s' if len(names) > 1 else ''} {', '.join(first)}{rest} ({hint})")
    for name, shape in expected.items():
        if found[name] != shape:
            raise EagleError(f"{path}: tensor {name}: expected shape {list(shape)}, got {list(found[name])}")
