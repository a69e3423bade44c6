"""Packed weights on disk, so that a second start neither dequantises nor packs."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_FORMAT_VERSION = "1"


def cache_directory() -> Path:
    """Where downloads and packed weights are kept: EAGLE_CACHE, or ~/.cache/eagle_engine."""
    return Path(os.environ.get("EAGLE_CACHE") or "~/.cache/eagle_engine").expanduser()


def load_or_build(
    source: Path, variant: str, build: Callable[[], dict[str, torch.Tensor]], directory: Path | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that `build` makes from the file `source`, from the cache when it has them.

    variant    what else decides the result (dtype, layout): letters, digits and dashes
    directory  default cache_directory() / "weights"

    The key is path, size and modification time of the source, variant and format version; a damaged cache file is rebuilt with a
    warning. A cache that cannot be written (no permission, disk full) costs a warning and the next start's time, nothing else.
    """
    directory = cache_directory() / "weights" if directory is None else directory
    stat = source.stat()
    path_hash = _hash(str(source.resolve()))
    family = f"{source.stem}.{path_hash}.{variant}."
    file = directory / f"{family}{_hash(f'{stat.st_size} {stat.st_mtime_ns} {_FORMAT_VERSION}')}.safetensors"
    if file.is_file():
        try:
            return _load(file)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            warnings.warn(f"{file}: the cached weights are damaged and will be built again ({error})", stacklevel=2)
    tensors = build()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _save(file, tensors)
        for old in directory.glob(f"{glob.escape(family)}*.safetensors"):
            if old != file:
                old.unlink(missing_ok=True)
    except (SafetensorError, OSError) as error:
        warnings.warn(f"{file}: the packed weights could not be cached ({error})", stacklevel=2)
    return tensors


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())


def _save(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    checksums = json.dumps({name: _checksum(tensor) for name, tensor in tensors.items()})
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".partial")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"crc32": checksums})
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def _load(file: Path) -> dict[str, torch.Tensor]:
    # "pread" rather than a mapping: mapped pages would count twice in the peak. Its tensors start anywhere; the clone is
    # 64-byte aligned like freshly packed weights, so that no row of a panel straddles two cache lines.
    with safe_open(file, framework="pt", backend="pread") as handle:
        checksums = json.loads((handle.metadata() or {})["crc32"])
        tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}
    if tensors.keys() != checksums.keys():
        raise ValueError("the list of tensors is not the one that was written")
    for name, tensor in tensors.items():
        if _checksum(tensor) != checksums[name]:
            raise ValueError(f"tensor {name} has a wrong checksum")
    return tensors
