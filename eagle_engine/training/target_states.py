"""What the drafter learns from: the target's states for every token of the data, computed once into files or for each batch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from eagle_engine.errors import EagleError
from eagle_engine.training.dataset import TokenData
from eagle_engine.training.whole_file import write_whole

_SHARD_TOKENS = 1 << 16
_BATCH_TOKENS = 4096  # of a forward of the target


class States(NamedTuple):
    """Of n tokens: states [n, fused_size], features [n, Ht], best [n] int64 (the target's likeliest next token)."""

    states: Tensor
    features: Tensor
    best: Tensor


class LiveStates:
    """States computed when they are asked for.

    model            a decoder of transformers with the target's weights
    captured_layers  layers whose inputs are handed over side by side; (): the feature itself
    """

    def __init__(self, model: torch.nn.Module, captured_layers: tuple[int, ...], dtype: torch.dtype) -> None:
        self.model, self.captured_layers, self.dtype = model.eval(), captured_layers, dtype

    @torch.inference_mode()
    def of(self, token_ids: Sequence[np.ndarray]) -> list[States]:
        """States of several conversations, computed together: padded on the right, which a causal model does not see."""
        lengths = [len(ids) for ids in token_ids]
        device = self.model.device
        padded = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, ids in enumerate(token_ids):
            padded[row, : len(ids)] = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        outputs = self.model.model(input_ids=padded.to(device), output_hidden_states=bool(self.captured_layers), use_cache=False)
        features = outputs.last_hidden_state
        hidden = outputs.hidden_states
        results = []
        for row, length in enumerate(lengths):
            feature = features[row, :length]
            states = torch.cat([hidden[i][row, :length] for i in self.captured_layers], dim=-1) if self.captured_layers else feature
            best = self.model.lm_head(feature).argmax(-1)
            results.append(States(states.to(self.dtype), feature.to(self.dtype), best))
        return results


class CachedStates:
    """States in files of about 65 thousand tokens each, which are memory-mapped; each is written under its name only when it is complete, so a run that was killed goes on with the next one."""

    def __init__(self, directory: Path, data: TokenData, captured_layers: tuple[int, ...]) -> None:
        self.directory, self._captured = directory, bool(captured_layers)
        self._shards = _shards(data)
        self._first = np.array([shard.start for shard in self._shards])
        self._offsets = data.offsets
        self._open: dict[int, safe_open] = {}

    def of_conversation(self, number: int) -> States:
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        if shard not in self._open:
            path = _shard_path(self.directory, shard)
            try:
                self._open[shard] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise EagleError(f"{path} cannot be read: {error}; remove it, and it is computed again") from error
        file, base = self._open[shard], self._offsets[self._shards[shard].start]
        rows = slice(int(self._offsets[number] - base), int(self._offsets[number + 1] - base))
        features = file.get_slice("features")[rows]
        states = file.get_slice("states")[rows] if self._captured else features
        return States(states, features, file.get_slice("best")[rows].long())


def cache_states(make_source: Callable[[tuple[int, ...]], LiveStates], directory: Path, data: TokenData, captured_layers: tuple[int, ...], description: dict, progress: bool) -> CachedStates:
    """Compute the states that `directory` lacks. make_source: captured layers -> source, called only when something is missing; description: of the target, which must be that of the files already there.

    Files with captured states serve a run that takes features alone, too.

    The size is estimated before the first file is written, and compared with the free disk space.
    """
    wanted = captured_layers
    directory.mkdir(parents=True, exist_ok=True)
    marker = directory / "states.json"
    description = description | {"data": data.fingerprint, "captured layers": list(captured_layers)}
    if marker.is_file():
        recorded = json.loads(marker.read_text())
        if not captured_layers and recorded.get("captured layers"):
            captured_layers, description["captured layers"] = tuple(recorded["captured layers"]), recorded["captured layers"]
        # What an older version did not record is not compared.
        different = [name for name in description if name in recorded and recorded[name] != description[name]]
        if different:
            raise EagleError(f"{directory} holds states of another {', '.join(different)}: remove it, or give another run directory")
    shards = _shards(data)
    missing = [number for number in range(len(shards)) if not _shard_path(directory, number).is_file()]
    if missing:
        source = make_source(captured_layers)
        width = source.model.config.hidden_size * (1 + len(source.captured_layers))
        tokens = sum(int(data.offsets[shards[number].stop] - data.offsets[shards[number].start]) for number in missing)
        needed, free = tokens * (width * source.dtype.itemsize + 4), shutil.disk_usage(directory).free
        if needed * 1.02 > free:
            raise EagleError(f"the target's states of {tokens} tokens need {needed / 1e9:.1f} GB in {directory}, {free / 1e9:.1f} GB are free: use fewer conversations, or states 'live'")
        write_whole(marker, json.dumps(description))
        with tqdm(total=tokens, desc=f"states of the target ({needed / 1e9:.1f} GB)", unit="token", unit_scale=True, disable=not progress) as bar:
            for number in missing:
                _write_shard(source, directory, number, shards[number], data, bar)
    return CachedStates(directory, data, wanted)


def _write_shard(source: LiveStates, directory: Path, number: int, shard: range, data: TokenData, bar: tqdm) -> None:
    found: dict[int, States] = {}
    for batch in batches_of_like_length(shard, data.lengths):
        for i, states in zip(batch, source.of([data.tokens[data.offsets[i] : data.offsets[i + 1]] for i in batch])):
            if not bool(torch.isfinite(states.features).all() & torch.isfinite(states.states).all()):
                raise EagleError(f"the target's states of conversation {data.ids[i]} are not finite in {str(source.dtype).removeprefix('torch.')}; use another states_dtype or target_dtype")
            found[i] = States(*(tensor.cpu() for tensor in states))
            bar.update(int(data.lengths[i]))
    tensors = {"features": torch.cat([found[i].features for i in shard]), "best": torch.cat([found[i].best for i in shard]).int()}
    if source.captured_layers:
        tensors["states"] = torch.cat([found[i].states for i in shard])
    path = _shard_path(directory, number)
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise EagleError(f"the target's states cannot be written to {path} ({shutil.disk_usage(directory).free / 1e6:.0f} MB are free): {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _shards(data: TokenData) -> list[range]:
    """Conversations of each file."""
    cuts, start = [0], 0
    for i in range(len(data)):
        if data.offsets[i + 1] - start >= _SHARD_TOKENS:
            cuts.append(i + 1)
            start = data.offsets[i + 1]
    if cuts[-1] != len(data):
        cuts.append(len(data))
    return [range(a, b) for a, b in zip(cuts, cuts[1:])]


def _shard_path(directory: Path, number: int) -> Path:
    return directory / f"states-{number:05d}.safetensors"


def batches_of_like_length(numbers: Iterable[int], lengths: np.ndarray) -> list[list[int]]:
    """Conversations for one forward of the target: of like length, so that little is padded, and about _BATCH_TOKENS tokens together."""
    batches: list[list[int]] = []
    for i in sorted(numbers, key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= _BATCH_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
