"""Hugging Face directories: config.json and one or several safetensors files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle_engine.checkpoint import Checkpoint, check_tensors, expected_tensors
from eagle_engine.errors import EagleError
from eagle_engine.model_config import ModelConfig, token_id_tuple

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


def download_from_hub(repository: str) -> Path:
    """Fetch a model of the Hugging Face hub, or find it in the hub's local cache; its directory."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # network, permission, unknown name: many exception types, one remedy
        raise EagleError(
            f"{repository!r} is neither a local directory nor a .gguf file, "
            f"and fetching it from the Hugging Face hub failed: {error}"
        ) from error


def open_directory(path: Path) -> Checkpoint:
    """Open a directory: config.json, and model.safetensors or the shards of model.safetensors.index.json."""
    try:
        config = ModelConfig.from_hf_dict(read_json(path / "config.json"))
    except EagleError as error:
        raise EagleError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    eos_token_ids = config.eos_token_ids
    if (path / "generation_config.json").is_file():
        eos_token_ids = token_id_tuple(read_json(path / "generation_config.json").get("eos_token_id")) or eos_token_ids
    files = {name: open_safetensors(path / name) for name in _weight_files(path)}
    file_of, found = {}, {}
    for file_name, handle in files.items():
        for name in handle.keys():
            if name in file_of:
                raise EagleError(f"{path}: tensor {name} is in both {file_of[name]} and {file_name}")
            file_of[name] = file_name
            found[name] = tuple(handle.get_slice(name).get_shape())

    def read(name: str) -> torch.Tensor:
        try:
            return files[file_of[name]].get_tensor(name)
        except SafetensorError as error:
            raise EagleError(f"{path / file_of[name]}: tensor {name} cannot be read: {error}") from error

    found = {name: shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")}
    expected = expected_tensors(config)
    if config.tie_word_embeddings and "lm_head.weight" in found:
        _check_tied(path, read)
        del found["lm_head.weight"]
    check_tensors(path, expected, found)
    return Checkpoint(path, replace(config, eos_token_ids=eos_token_ids), expected, read)


def _check_tied(path: Path, read) -> None:
    head, embedding = read("lm_head.weight"), read("model.embed_tokens.weight")
    if head.shape != embedding.shape or not torch.equal(head, embedding):
        raise EagleError(
            f"{path}: config.json ties lm_head.weight to model.embed_tokens.weight, but the two tensors differ"
        )


def _weight_files(path: Path) -> list[str]:
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise EagleError(f"{path / _INDEX}: no weight_map from tensor names to file names")
        names = sorted(set(weight_map.values()))
        for name in names:
            if not (path / name).is_file():
                raise EagleError(f"{path / name}: no such file, though {_INDEX} lists it")
        return names
    if (path / _SINGLE_FILE).is_file():
        return [_SINGLE_FILE]
    others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.gguf") for file in path.glob(pattern))
    hint = f"; found {', '.join(others[:3])}, which this loader does not take from a directory" if others else ""
    raise EagleError(f"{path}: neither {_SINGLE_FILE} nor {_INDEX}{hint}")


def open_safetensors(path: Path):
    """An open safetensors file; a truncated or damaged one is an EagleError that names it."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise EagleError(f"{path}: not a complete safetensors file, it may be truncated: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else is an EagleError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EagleError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise EagleError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise EagleError(f"{path}: expected a JSON object")
    return value
