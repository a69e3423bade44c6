"""The container format of GGUF files: metadata, tensor directory, dequantisation.

The header is parsed here, because `gguf.GGUFReader` builds one numpy view per string: 5 s for the two vocabulary lists of a 49k
tokenizer against 0.2 s, and a truncated file shows as a numpy error. Types, block sizes and dequantisation are those of `gguf`.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from eagle_engine.errors import EagleError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
)


class GgufTensor(NamedTuple):
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous
    quantisation: GGMLQuantizationType
    start: int  # byte in the file
    num_bytes: int


class GgufFile:
    """An open GGUF file: metadata: key -> value, tensors: name -> GgufTensor; the data stays on disk until it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise EagleError(f"{path}: the file is empty") from None
        if self._data[:4] != _MAGIC:
            raise EagleError(f"{path}: not a GGUF file")
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise EagleError(f"{path}: the header is damaged or the file is truncated ({error})") from error
        size = len(self._data)
        for name, tensor in self.tensors.items():
            if tensor.start + tensor.num_bytes > size:
                end = tensor.start + tensor.num_bytes
                raise EagleError(
                    f"{path}: the file is truncated: tensor {name} ends at byte {end}, the file at byte {size}"
                )

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """A tensor (or entry `index` of its first dimension), dequantised: float32, or float16 and bfloat16 as stored."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        shape = tensor.shape
        if index is not None:
            raw, shape = np.split(raw, shape[0])[index], shape[1:]
        kind = tensor.quantisation
        if kind == GGMLQuantizationType.BF16:
            return torch.from_numpy(raw.copy()).view(torch.bfloat16).reshape(shape)
        if kind == GGMLQuantizationType.F16:
            return torch.from_numpy(raw.copy()).view(torch.float16).reshape(shape)
        if kind == GGMLQuantizationType.F32:
            return torch.from_numpy(raw.copy()).view(torch.float32).reshape(shape)
        return torch.from_numpy(dequantize(raw.reshape(*shape[:-1], -1), kind)).reshape(shape)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._data, 4)
        if version not in (2, 3):
            raise EagleError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 are (little-endian)")
        position = 24
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._data, position)
            metadata[key], position = self._value(kind, position + 4)
        entries = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (num_dims,) = struct.unpack_from("<I", self._data, position)
            if num_dims > 8:
                raise EagleError(f"{self.path}: tensor {name} claims {num_dims} dimensions; the file is damaged")
            *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", self._data, position + 4)
            position += 4 + 8 * num_dims + 12
            entries.append((name, tuple(reversed(dims)), kind, offset))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise EagleError(f"{self.path}: general.alignment {alignment!r} is not a positive integer")
        base = -(-position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise EagleError(f"{self.path}: tensor {name} is listed twice")
            tensors[name] = self._tensor(name, shape, kind, base + offset)
        return metadata, tensors

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        known = kind in GGMLQuantizationType._value2member_map_
        quantisation = GGMLQuantizationType(kind) if known else None
        if quantisation not in SUPPORTED_TYPES:
            title = quantisation.name if known else f"number {kind}"
            supported = ", ".join(t.name for t in SUPPORTED_TYPES)
            raise EagleError(
                f"{self.path}: tensor {name} has quantisation {title}, which is not supported; supported are {supported}"
            )
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
        if not shape or shape[-1] % block:
            raise EagleError(
                f"{self.path}: tensor {name} of shape {list(shape)} is not made of whole {quantisation.name} blocks of {block}"
            )
        num_elements = 1
        for size in shape:
            num_elements *= size
        return GgufTensor(shape, quantisation, start, num_elements // block * block_bytes)

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, position)
        end = position + 8 + length
        if end > len(self._data):
            raise EagleError(
                f"{self.path}: the file is truncated or damaged: a string ends at byte {end}, the file at byte {len(self._data)}"
            )
        return self._data[position + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == GGUFValueType.STRING:
            return self._string(position)
        if kind == GGUFValueType.ARRAY:
            item_kind, length = struct.unpack_from("<IQ", self._data, position)
            return self._array(item_kind, length, position + 12)
        code = _SCALARS.get(kind)
        if code is None:
            raise EagleError(f"{self.path}: unknown metadata type {kind} at byte {position}; the file is damaged")
        return struct.unpack_from(code, self._data, position)[0], position + struct.calcsize(code)

    def _array(self, kind: int, length: int, position: int) -> tuple[list, int]:
        if kind in _SCALARS:
            code = f"<{length}{_SCALARS[kind][1]}"
            if struct.calcsize(code) > len(self._data):
                raise EagleError(
                    f"{self.path}: the file is truncated or damaged: an array of {length} values at byte {position}"
                )
            return list(struct.unpack_from(code, self._data, position)), position + struct.calcsize(code)
        values = []
        for _ in range(length):
            value, position = self._value(kind, position)
            values.append(value)
        return values, position
