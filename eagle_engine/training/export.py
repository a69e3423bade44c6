"""A trained drafter as a directory in the published format."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle_engine.drafter_checkpoint import RANKING_FILE
from eagle_engine.drafter_config import DrafterConfig
from eagle_engine.errors import EagleError
from eagle_engine.training.model import stored_dtype

_RANKED = 32768


def draft_vocab_of(counts: np.ndarray, size: int) -> Tensor:
    """The `size` most frequent tokens, ascending, [size] int64; of equally frequent ones the smaller ids, so that a small corpus fills the vocabulary too."""
    return torch.from_numpy(np.sort(ranked(counts)[:size]))


def ranked(counts: np.ndarray) -> np.ndarray:
    """All token ids, most frequent first."""
    return np.argsort(-counts, kind="stable").astype(np.int64)


def export(directory: Path, config: DrafterConfig, weights: dict[str, Tensor], dtype: str, draft_vocab: Tensor | None, counts: np.ndarray) -> None:
    """Write config.json and model.safetensors, and for EAGLE-1/2 the ranking of tokens that a smaller draft vocabulary is cut from. The directory appears under its name when it is complete.

    weights      published name -> tensor
    dtype        of the matrices; in eight bits config.json says float16, in which readers are to compute
    draft_vocab  [Vd] int64 ascending; d2t and t2d of EAGLE-3 are made from it
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    stored = getattr(torch, dtype)
    tensors = {}
    for name, weight in weights.items():
        tensors[name] = weight.detach().cpu().to(stored_dtype(weight, stored)).contiguous()
        if not bool(torch.isfinite(tensors[name].float()).all()):
            raise EagleError(f"weight {name} is not finite in {dtype}: export in another dtype")
    if config.has_own_vocab:
        tensors["d2t"] = draft_vocab - torch.arange(len(draft_vocab))
        tensors["t2d"] = torch.zeros(config.layer.vocab_size, dtype=torch.bool).index_fill(0, draft_vocab, True)
    try:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise EagleError(f"the drafter cannot be written to {directory} ({shutil.disk_usage(partial).free / 1e6:.0f} MB are free): {error}; the last checkpoint is kept") from error
    (partial / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    (partial / "config.json").write_text(json.dumps(config.to_dict(dtype if stored.itemsize > 1 else "float16"), indent=1) + "\n")
    if config.version == 1:
        np.save(partial / RANKING_FILE, ranked(counts)[: min(_RANKED, int((counts > 0).sum()))].astype(np.int32))
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.replace(directory, old)
    os.replace(partial, directory)
    shutil.rmtree(old, ignore_errors=True)
