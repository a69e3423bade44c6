"""The tests of the Triton kernels on a real GPU (TRITON_INTERPRET=0): their tensors are made there, and the references go on computing on the CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from eagle_kernels import reference


def kernels_are_compiled() -> bool:
    """This process runs Triton kernels for real, on a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()


def on_cpu(function: Callable[..., object], device: str) -> Callable[..., object]:
    """The function run on copies of its tensors on the CPU; results, and what it modified, go back to the device. A reference's bits are those of the CPU: torch's own kernels round their own way."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def there(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.detach().to("cpu", copy=True)
            copies.append((tensor, copy))
            return copy

        with torch.device("cpu"):
            before = [mapped(value, there) for value in (args, kwargs)]
            originals = [copy.clone() for _, copy in copies]
            result = function(*before[0], **before[1])
        for (tensor, copy), original in zip(copies, originals):
            if not torch.equal(bytes_of(copy), bytes_of(original)):
                tensor.copy_(copy)
        return mapped(result, lambda tensor: tensor.to(device))

    return call


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x).flatten().view(torch.uint8)


def mapped(value: object, function: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """The value with every tensor in it replaced; dictionaries, lists, tuples and NamedTuples are looked into."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def references_on_cpu(device: str) -> dict[str, Callable[..., object]]:
    """Name -> wrapped function, of every public reference."""
    return {name: on_cpu(getattr(reference, name), device) for name in reference.__all__}
