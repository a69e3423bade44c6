"""Checks of the ops that are launched from Python, with one form of message. They look at shape, dtype, strides and device, never at values."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype | tuple[torch.dtype, ...], device: torch.device | None = None, *, contiguous: str = "all"
) -> None:
    """Raise ValueError "name: expected [4, *] int32, contiguous on cuda:0, got [4, 8] int64 on cpu" unless the tensor is of this kind.

    shape       None: any size
    device      None: any
    contiguous  "all", "last" (the last dimension, the others may have any stride) or "any"
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    fits = tensor.dim() == len(shape) and all(wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape))
    fits = fits and tensor.dtype in dtypes and (device is None or tensor.device == device)
    if fits and tensor.numel() > 0:
        if contiguous == "all":
            fits = tensor.is_contiguous()
        elif contiguous == "last":
            fits = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if not fits:
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        kinds = " or ".join(_short(kind) for kind in dtypes)
        layout = {"all": ", contiguous", "last": ", last dimension contiguous", "any": ""}[contiguous]
        note = "" if tensor.is_contiguous() else " (not contiguous)"
        where = "" if device is None else f" on {device}"
        raise ValueError(f"{name}: expected [{sizes}] {kinds}{layout}{where}, got {list(tensor.shape)} {_short(tensor.dtype)}{note} on {tensor.device}")


def refuse(wrong: bool, name: str, expected: str, got: object) -> None:
    """Raise ValueError "name: expected ..., got ..." if `wrong`."""
    if wrong:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
