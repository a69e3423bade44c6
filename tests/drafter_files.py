"""Drafter directories for tests, and the published layouts of EAGLE-3 that a canonical one can be turned into."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Files = tuple[dict, dict[str, Tensor]]  # config.json and tensors


def write_drafter(directory: Path, raw: dict, tensors: dict[str, Tensor], binary: bool = False) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    if binary:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


def published(raw: dict, tensors: dict) -> Files:
    """As the authors' files: plain architecture, no head_dim."""
    return {key: value for key, value in raw.items() if key != "head_dim"} | {"architectures": ["LlamaForCausalLM"]}, tensors


def specforge(raw: dict, tensors: dict) -> Files:
    return raw | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": True}, "num_aux_hidden_states": 3}, tensors


def prefixed(raw: dict, tensors: dict) -> Files:
    """Every name below "model."."""
    return raw, {f"model.{name}": tensor for name, tensor in tensors.items()}


def half_prefixed(raw: dict, tensors: dict) -> Files:
    """As transformers lays a model out: head and vocabulary beside "model."."""
    return raw, {name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}": tensor for name, tensor in tensors.items()}


def legacy(raw: dict, tensors: dict) -> Files:
    """EAGLE-3.1 as it was first written."""
    old = {f"fc_norm.{i}.weight": f"aux_norm_{place}.weight" for i, place in enumerate(("low", "mid", "high"))}
    return raw, {old.get(name, name): tensor for name, tensor in tensors.items()}


OWN_KEYS = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids")


def speculators(raw: dict, tensors: dict) -> Files:
    """Sizes of the layer in transformer_layer_config, which says its one layer as layers.0."""
    nested = {key: value for key, value in raw.items() if key not in OWN_KEYS}
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": nested, "norm_before_residual": False, "target_hidden_size": None,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy"}], "verifier": {"name_or_path": "a/b", "architectures": ["LlamaForCausalLM"]}},
        "embed_requires_grad": False,
    }  # fmt: skip
    config |= {key: raw[key] for key in OWN_KEYS if key in raw}
    return config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


LAYOUTS = {"published": published, "specforge": specforge, "prefixed": prefixed, "half-prefixed": half_prefixed, "legacy-names": legacy, "speculators": speculators}
