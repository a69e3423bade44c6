"""eagle inspect: what is in a target and a drafter, and whether the two fit."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from eagle_engine.checkpoint import Checkpoint, open_checkpoint
from eagle_engine.cli.common import print_json, show_progress
from eagle_engine.demo import demo_target_path
from eagle_engine.drafter_checkpoint import RANKING_FILE, read_drafter, read_token_ids
from eagle_engine.drafter_config import FLAGS, DrafterConfig, misfits
from eagle_engine.loading import DEMO, drafter_path
from eagle_engine.errors import EagleError
from eagle_engine.model_config import ModelConfig
from eagle_engine.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> int:
    target = draft = None
    if args.target != "none":
        checkpoint = open_checkpoint(demo_target_path(show_progress()) if args.target == DEMO else args.target)
        target = describe_target(checkpoint)
    if args.draft == "auto" and args.target != DEMO:
        draft_path = None
    else:
        draft_path = drafter_path(args.draft, args.target == DEMO)
    if draft_path is not None:
        config, tensors = read_drafter(draft_path, args.draft_layer_ids)
        draft = describe_drafter(draft_path, config, tensors, None if target is None else checkpoint.config)
    if target is None and draft is None:
        raise EagleError("nothing to inspect: give --target, --draft or both")
    result: dict[str, Any] = {"target": target, "draft": draft}
    if target is not None and draft is not None:
        reasons = misfits(config, checkpoint.config)
        result |= {"fits": not reasons, "reason": "; ".join(reasons) or None}
    if args.json:
        print_json(result)
    else:
        _print(result)
    return 0 if result.get("fits", True) else 1


def describe_target(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "path": str(checkpoint.path),
        "format": "Hugging Face directory" if checkpoint.gguf_metadata is None else "GGUF",
        "architecture": config.architecture,
        "parameters": sum(math.prod(shape) for shape in checkpoint.shapes.values()),
        "dtype": config.dtype if checkpoint.gguf_metadata is None else _gguf_types(checkpoint),
        **_sizes(config),
        "num_layers": config.num_layers,
        "num_experts": config.num_experts or None,
        "experts_per_token": config.num_experts_per_token or None,
        "tied_embeddings": config.tie_word_embeddings,
        "biases": [name for name, there in (("qkv", config.qkv_bias), ("o", config.o_bias), ("mlp", config.mlp_bias)) if there],
        "sliding_window": config.sliding_window or None,
        "tokenizer": _tokenizer(checkpoint),
    }


def describe_drafter(path: Path, config: DrafterConfig, tensors: dict, target: ModelConfig | None) -> dict[str, Any]:
    """tensors: name -> tensor, as `read_drafter` returns them; target: says which layers are captured where the drafter takes the default ones."""
    layer = config.layer
    ranking = None
    if (path / RANKING_FILE).is_file():
        ranking = len(read_token_ids(path / RANKING_FILE, layer.vocab_size))
    return {
        "path": str(path),
        "version": _version(config),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtype": _join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        **_sizes(layer),
        **(_eagle3(config, target) if config.version == 3 else {"fc_bias": config.bias, "qkv_bias": config.qkv_bias}),
        "embeddings": "own" if "embed_tokens.weight" in tensors else "target's",
        "head": "own" if "lm_head.weight" in tensors else "target's",
        "ranked_tokens": ranking,
    }


def _version(config: DrafterConfig) -> str:
    if config.version == 1:
        return "EAGLE-1/2"
    return "EAGLE-3.1" if any(getattr(config, name) for name in FLAGS) else "EAGLE-3"


def _eagle3(config: DrafterConfig, target: ModelConfig | None) -> dict[str, Any]:
    ids = config.captured_layer_ids
    if ids is None and target is not None and not misfits(config, target):
        ids = config.captured_layers(target.num_layers)
    return {
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "captured_states": "inputs of layers " + ("2, N // 2 and N - 3 of N" if ids is None else ", ".join(map(str, ids))),
        "flags": [name for name in FLAGS if getattr(config, name)],
    }


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
    }


def _rope_scaling(config: ModelConfig) -> str | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    if scaling["rope_type"] == "freq_factors":
        return "frequency factors from the file"
    return f"{scaling['rope_type']}, factor {scaling['factor']:g}"


def _gguf_types(checkpoint: Checkpoint) -> str:
    from eagle_engine.gguf_file import GgufFile

    return _join(tensor.quantisation.name for tensor in GgufFile(checkpoint.path).tensors.values())


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    except EagleError as error:
        return {"error": str(error)}
    ends = [{"id": token, "text": tokenizer.decode([token], skip_special_tokens=False)} for token in tokenizer.eos_token_ids]
    return {"vocab_size": tokenizer.vocab_size, "chat_template": tokenizer.chat_template is not None, "end_tokens": ends}


def _join(names) -> str:
    return ", ".join(sorted(set(names)))


def _print(result: dict[str, Any]) -> None:
    for title in ("target", "draft"):
        if result[title] is None:
            continue
        print(title)
        for key, value in result[title].items():
            if key == "tokenizer":
                value = _tokenizer_text(value)
            elif key == "parameters":
                value = f"{value / 1e6:,.1f} million"
            elif isinstance(value, bool):
                value = "yes" if value else "no"
            elif isinstance(value, list):
                value = ", ".join(value) or None
            elif isinstance(value, float):
                value = f"{value:g}"
            if value is not None:
                print(f"  {key.replace('_', ' '):<24} {value}")
    if "fits" in result:
        print("the drafter fits the target" if result["fits"] else f"the drafter does not fit the target: {result['reason']}")


def _tokenizer_text(tokenizer: dict[str, Any]) -> str:
    if "error" in tokenizer:
        return f"not usable: {tokenizer['error']}"
    ends = ", ".join(f"{end['id']} {end['text']!r}" for end in tokenizer["end_tokens"])
    return f"{tokenizer['vocab_size']} tokens, {'with' if tokenizer['chat_template'] else 'without'} a chat template, end tokens {ends or 'none'}"
