"""Drafter directories: config.json with model.safetensors or pytorch_model.bin, in any published layout, read strictly."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle_engine.checkpoint import check_tensors
from eagle_engine.drafter_config import LAYER, NUM_CAPTURED, DrafterConfig
from eagle_engine.drafter_format import parse_drafter_config, stated_version
from eagle_engine.errors import EagleError
from eagle_engine.huggingface_checkpoint import open_safetensors, read_json

RANKING_FILE = "token_ranking.npy"  # beside an EAGLE-1/2 drafter: token ids, most frequent first

# EAGLE-3.1 as it was first written -> as it is written now.
_LEGACY_NAMES = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Matrices may be stored in eight bits, without scales: a file that has scales is refused for tensors that nothing uses.
_MATRIX_FLOATS = _FLOATS + (torch.float8_e4m3fn,)


def read_drafter(path: Path, layer_ids: str | None = None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration and tensors of a drafter directory, under the names of DrafterConfig.expected_tensors whatever the layout.

    layer_ids  "input" or "output": what ids of captured layers count where config.json does not say

    The tensors tell the version, and config.json must agree. Any missing, unused or mis-shaped tensor is an error, and so is a draft vocabulary that is none.
    """
    if not path.is_dir():
        raise EagleError(f"{path}: no such drafter directory")
    try:
        return _read(path, layer_ids)
    except EagleError as error:
        raise EagleError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _read(path: Path, layer_ids: str | None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    raw = read_json(path / "config.json")
    tensors = plain_names(_read_tensors(path))
    _check_version(raw, tensors)
    config = parse_drafter_config(raw, layer_ids)
    if config.version == 3:
        tensors = _midlayer_names(tensors)
        _check_flags(config, tensors)
    expected = config.expected_tensors() | {name: shape for name, shape in config.optional_tensors().items() if name in tensors}
    check_tensors(path, expected, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        wanted = {"d2t": (torch.int64,), "t2d": (torch.bool,)}.get(name, _FLOATS if tensor.dim() < 2 else _MATRIX_FLOATS)
        if tensor.dtype not in wanted:
            raise EagleError(f"tensor {name} is {_short(tensor.dtype)}; expected {' or '.join(map(_short, wanted))}")
    _check_vocabulary(config, tensors)
    return config, tensors if config.has_own_vocab else {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefix "model." that some exporters write, without tables of rotary embeddings, and without names that have gone out of use."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        plain = _LEGACY_NAMES.get(plain, plain)
        if plain.endswith("rotary_emb.inv_freq"):
            continue
        if plain in result:
            raise EagleError(f"tensor {plain} is there twice, once as {name}")
        result[plain] = tensor
    return result


def version_of_tensors(tensors: dict[str, Tensor]) -> tuple[int, str]:
    """The version of a drafter by the names and shapes of its tensors, and what in them says so."""
    signs = [name for name in ("d2t", "t2d") if name in tensors]
    signs += sorted(name for name in tensors if name.startswith(LAYER[3]) or name.endswith("hidden_norm.weight"))[:1]
    fc, query = tensors.get("fc.weight"), tensors.get(LAYER[1] + "self_attn.q_proj.weight")
    if fc is not None and query is not None and query.shape[-1] == 2 * fc.shape[0]:
        signs.append("attention over pairs, twice as wide as fc's output")
    return (3, ", ".join(signs)) if signs else (1, "no midlayer, no hidden_norm, no d2t")


def _check_version(raw: dict, tensors: dict[str, Tensor]) -> None:
    if "mask_hidden" in tensors:
        raise EagleError("this is a P-EAGLE drafter (tensor mask_hidden), which drafts several tokens in one forward; it is not supported")
    (stated, why), (found, signs) = stated_version(raw), version_of_tensors(tensors)
    if stated != found:
        names = {1: "an EAGLE-1/2 drafter", 3: "an EAGLE-3 drafter"}
        raise EagleError(f"config.json and tensors contradict each other: config.json is that of {names[stated]} ({why}), the tensors are those of {names[found]} ({signs})")


def _midlayer_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """speculators write the layer as layers.0."""
    layers = sorted(name for name in tensors if name.startswith("layers."))
    if layers and any(name.startswith(LAYER[3]) for name in tensors):
        raise EagleError(f"the layer is there twice, as {LAYER[3]}* and as {layers[0]}")
    more = [name for name in layers if not name.startswith(LAYER[1])]
    if more:
        raise EagleError(f"this EAGLE-3 drafter has several layers (tensor {more[0]}); drafters of several layers are not supported")
    return {LAYER[3] + name.removeprefix(LAYER[1]) if name.startswith(LAYER[1]) else name: tensor for name, tensor in tensors.items()}


def _check_flags(config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    """Norms before fc are there when config.json says so, and only then: both halves are named, since either may be the wrong one."""
    for flag, names in (("fc_norm", [f"fc_norm.{i}.weight" for i in range(NUM_CAPTURED)]), ("norm_before_fc", ["input_norm.weight"])):
        found = [name for name in names if name in tensors]
        if getattr(config, flag) and not found:
            raise EagleError(f"config.json sets {flag}, but there is no tensor {', '.join(names)}")
        if found and not getattr(config, flag):
            raise EagleError(f"there is a tensor {', '.join(found)}, but config.json does not set {flag}")


def _check_vocabulary(config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    """d2t [draft vocabulary] says how far above draft id i its target id is, t2d [vocabulary] which target ids there are."""
    if "d2t" not in tensors and "t2d" not in tensors:
        return
    vocab_size, draft_vocab_size = config.layer.vocab_size, config.draft_vocab_size
    offsets, member = tensors.get("d2t"), tensors.get("t2d")
    if not config.has_own_vocab:
        if (offsets is not None and offsets.any()) or (member is not None and not member.all()):
            raise EagleError(f"draft_vocab_size is the whole vocabulary of {vocab_size}, but d2t and t2d choose tokens: readers drop them then, so the two must say nothing")
        return
    if not offsets.any() and not member[:draft_vocab_size].all():
        raise EagleError(f"d2t is all zero for {draft_vocab_size} of {vocab_size} tokens, and t2d names others than the first: whatever wrote the file has lost the draft vocabulary")
    ids = target_ids(offsets)
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(bad):
        first = int(bad[0])
        raise EagleError(f"d2t: draft id {first} is token {int(ids[first])}, expected 0 to {vocab_size - 1} ({len(bad)} such ids)")
    unique, counts = ids.unique(return_counts=True)
    if len(unique) != len(ids):
        raise EagleError(f"d2t: token {int(unique[counts > 1][0])} stands {int(counts.max())} times in the draft vocabulary; expected {len(ids)} different tokens, got {len(unique)}")
    if int(member.sum()) != draft_vocab_size:
        raise EagleError(f"t2d marks {int(member.sum())} tokens, draft_vocab_size is {draft_vocab_size}")
    if not member[ids].all():
        raise EagleError(f"d2t and t2d disagree: token {int(ids[~member[ids]][0])} is a draft token by d2t and none by t2d")


def target_ids(offsets: Tensor) -> Tensor:
    """d2t [draft vocabulary] int64 -> the target id of each draft id."""
    return torch.arange(len(offsets), device=offsets.device) + offsets


def _read_tensors(path: Path) -> dict[str, Tensor]:
    safetensors, pickled = path / "model.safetensors", path / "pytorch_model.bin"
    if safetensors.is_file():
        handle = open_safetensors(safetensors)
        return {name: handle.get_tensor(name) for name in handle.keys()}
    if not pickled.is_file():
        raise EagleError(f"{path}: neither model.safetensors nor pytorch_model.bin")
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise EagleError(f"{pickled}: cannot be read; it is truncated or no checkpoint of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise EagleError(f"{pickled}: expected a dictionary of tensors")
    return tensors


def read_token_ids(path: Path, vocab_size: int, count: int | None = None) -> Tensor:
    """A draft vocabulary: token ids, most frequent first, from a .npy or .json file; the first `count` of them, as int64."""
    try:
        ids = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.asarray(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise EagleError(f"{path}: expected a list of token ids as .npy or .json: {error}") from error
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise EagleError(f"{path}: expected a list of token ids, got an array of shape {list(ids.shape)} and type {ids.dtype}")
    ids = torch.from_numpy(ids.astype(np.int64))
    if count is not None:
        if count > len(ids):
            raise EagleError(f"{path}: a draft vocabulary of {count} was asked for, the list holds {len(ids)} tokens")
        ids = ids[:count]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise EagleError(f"{path}: token ids must lie in 0..{vocab_size - 1}, found {int(ids.min())}..{int(ids.max())}")
    if len(ids.unique()) != len(ids):
        raise EagleError(f"{path}: a token id stands twice in the draft vocabulary")
    return ids


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
