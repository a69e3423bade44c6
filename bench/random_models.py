"""Targets and drafters with random weights of a given shape, for benchmarks and for tests on a GPU: no checkpoint, no tokenizer."""

from __future__ import annotations

from dataclasses import replace

import torch
from shapes import ModelShape
from torch import Tensor

from eagle_engine.drafter import Drafter
from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.model_config import ModelConfig
from eagle_engine.target import TargetModel
from eagle_engine.target_weights import packed_shapes
from eagle_kernels import pack_weight, unpack_weight


def model_config(shape: ModelShape, max_positions: int) -> ModelConfig:
    return ModelConfig(
        "llama", shape.hidden, shape.intermediate, shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim, shape.vocab, 1e-5, 500_000.0, max_positions, dtype="bfloat16"
    )  # fmt: skip


def random_target(shape: ModelShape, max_positions: int, *, device: str, dtype: torch.dtype = torch.bfloat16, deterministic: bool = False, next_token: Tensor | None = None, update: float = 1.0) -> TargetModel:
    """Random weights, drawn on the device.

    next_token  [V] int64, a permutation: the head has the embedding of token i as its row next_token[i], so that with small updates the greedy token after i is next_token[i] by a wide
                margin (the norm of an embedding against its products with others), however the kernels round. None: a random head
    update      factor on what the layers add to the embeddings
    """
    config = model_config(shape, max_positions)
    sizes = packed_shapes(config)

    def matrix(kind: str, scale: float = 1.0) -> Tensor:
        out_features, in_features = sizes[kind]
        return torch.empty(out_features, in_features, dtype=dtype, device=device).normal_(0.0, scale * in_features**-0.5)

    embedding = torch.empty(*sizes["embedding"], dtype=dtype, device=device).normal_()
    head = matrix("head")
    if next_token is not None:
        head[next_token] = embedding * shape.hidden**-0.5
    ones = torch.ones(shape.hidden, device=device)
    weights = {"embedding": pack_weight(embedding).data, "head": pack_weight(head).data, "final_norm": ones}
    for i in range(shape.layers):
        layer = {"attention_norm": ones, "mlp_norm": ones}
        for kind in ("qkv", "o", "gate_up", "down"):
            layer[kind] = pack_weight(matrix(kind, update if kind in ("o", "down") else 1.0)).data
        weights |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return TargetModel(config, weights, max_positions, deterministic)


def random_drafter(target: TargetModel, shape: ModelShape, draft_vocab: int | None = None, *, follows_embedding: bool = False) -> Drafter:
    """EAGLE-1/2: one layer of the target's own shape; draft_vocab: the first so many tokens.

    follows_embedding: its feature is about the embedding of the last token, so that it is often right about a target whose head is a permutation of its embedding
    """
    config = DrafterConfig(1, replace(model_config(shape, 64), num_layers=1, rope_theta=10_000.0), shape.hidden)
    tensors = random_tensors(config, target)
    if follows_embedding:
        tensors["fc.weight"].mul_(0.2)[:, : shape.hidden].add_(torch.eye(shape.hidden, dtype=target.dtype, device=target.device))
    return Drafter(config, tensors, target, max_positions=target.max_positions, draft_vocab=None if draft_vocab is None else torch.arange(draft_vocab))


def random_eagle3(target: TargetModel, shape: ModelShape, draft_vocab: int | None = None, *, next_token: Tensor | None = None) -> Drafter:
    """EAGLE-3: one layer of the target's own shape, with a head over the first draft_vocab tokens (None: over all of them).

    next_token  of the target: the fused feature of token i is about its embedding, and the head has that as its row next_token[next_token[i]], so that the first guess after a committed token is
                often right; those after it are not
    """
    layers = shape.layers
    ids = None if layers >= 7 else (0, layers // 2, layers)
    layer = replace(model_config(shape, 64), num_layers=1, rope_theta=10_000.0)
    config = DrafterConfig(3, layer, shape.hidden, draft_vocab_size=draft_vocab or shape.vocab, captured_layer_ids=ids)
    tensors = random_tensors(config, target)
    if config.has_own_vocab:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=target.device)
    if next_token is not None:
        if config.has_own_vocab:
            raise ValueError("next_token: expected None with a draft vocabulary, got a permutation of the whole one")
        tensors["fc.weight"].mul_(0.2)[:, : shape.hidden].add_(torch.eye(shape.hidden, dtype=target.dtype, device=target.device))
        tensors["lm_head.weight"][next_token] = unpack_weight(target.head)
        for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
            tensors[name].mul_(0.2)
    return Drafter(config, tensors, target, max_positions=target.max_positions)


def random_tensors(config: DrafterConfig, target: TargetModel) -> dict[str, Tensor]:
    """Every weight of a drafter, on the target's device and in its dtype; norms are ones. d2t and t2d are the caller's."""
    tensors = {}
    for name, size in config.expected_tensors().items():
        if name not in ("d2t", "t2d"):
            tensor = torch.empty(size, dtype=target.dtype, device=target.device)
            tensors[name] = tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, size[-1] ** -0.5)
    return tensors
