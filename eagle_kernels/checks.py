"""Checks of the arguments of ops that are launched from Python; csrc/torch_checks.h has the same for C++, with the same messages."""

import torch
from torch import Tensor

_CONTIGUOUS = {"all": ", contiguous", "last": ", last dimension contiguous", "any": ""}


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | tuple[torch.dtype, ...], device: torch.device | None = None, contiguous: str = "all"
) -> None:
    """ValueError 'name: expected [4, *] int32, contiguous on cuda:0, got [4, 8] int64 on cpu' unless the tensor is as described.

    shape       None = any size
    dtype       one, or those allowed
    device      None = any
    contiguous  "all", "last" (the last dimension; the others may have any stride) or "any"
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    fits = tensor.dim() == len(shape) and all(size is None or size == actual for size, actual in zip(shape, tensor.shape))
    if contiguous == "all":
        dense = tensor.is_contiguous()
    elif contiguous == "last":
        dense = tensor.numel() == 0 or tensor.dim() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    else:
        dense = True
    if fits and dense and tensor.dtype in dtypes and (device is None or tensor.device == device):
        return
    wanted = ", ".join("*" if size is None else str(size) for size in shape)
    where = "" if device is None else f" on {device}"
    got = f"{list(tensor.shape)} {_short(tensor.dtype)}{'' if tensor.is_contiguous() else ' (not contiguous)'} on {tensor.device}"
    raise ValueError(f"{name}: expected [{wanted}] {' or '.join(map(_short, dtypes))}{_CONTIGUOUS[contiguous]}{where}, got {got}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
