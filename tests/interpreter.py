"""What the tests of Triton kernels under the interpreter share."""

import sys
from collections.abc import Iterator

import numpy
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def _dot_in_order(self: object, a: interpreter.TensorHandle, b: interpreter.TensorHandle, d: interpreter.TensorHandle, *options: object) -> interpreter.TensorHandle:
    total = d.data.copy()
    for k in range(a.data.shape[-1]):
        total += a.data[:, k : k + 1].astype(total.dtype) * b.data[k].astype(total.dtype)
    return interpreter.TensorHandle(total, d.dtype.scalar)


@pytest.fixture
def fixed_order_dot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Matrix products as one chain per element over ascending k. numpy's own depend on where in its tile a row stands, which a GPU's do not."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_order)
    yield


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and of the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size() if x.numel() else x.data_ptr()


@pytest.fixture
def checked_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two checks of every launch of the test: it has the constants and options of a case in aot_cases(), so that what dispatch can choose is compiled ahead of time; and every load and store lies within
    one of the tensors of its arguments."""
    run, builder = interpreter.InterpretedFunction.run, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    extents: list[tuple[int, int]] = []

    def checked_run(self: interpreter.InterpretedFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        modules = [module for name, module in sys.modules.items() if name.startswith("eagle_kernels.triton.") and hasattr(module, "aot_cases")]
        listed = [case.constants | case.options for module in modules for case in module.aot_cases() if case.kernel is self]
        assert kwargs in listed, f"{self.__name__} was launched with {kwargs}, which aot_cases() does not list"
        extents[:] = [_extent(arg) for arg in args if isinstance(arg, torch.Tensor)]
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def check(what: str, ptrs: interpreter.TensorHandle, mask: interpreter.TensorHandle) -> None:
        addresses = ptrs.data[numpy.broadcast_to(mask.data, ptrs.data.shape).astype(bool)]
        if addresses.size:
            first, end = int(addresses.min()), int(addresses.max()) + ptrs.get_element_ty().primitive_bitwidth // 8
            assert any(low <= first and end <= high for low, high in extents), f"{what} outside of every argument"

    def checked_load(self: object, ptrs: interpreter.TensorHandle, mask: interpreter.TensorHandle, *rest: object) -> interpreter.TensorHandle:
        check("load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self: object, ptrs: interpreter.TensorHandle, value: interpreter.TensorHandle, mask: interpreter.TensorHandle, *rest: object) -> object:
        check("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", checked_run)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    yield


_patched: set[frozenset[str]] = set()


def _call_device_function(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """As the interpreter has it, but for the patching of triton.language, which there is done anew for every call and takes half of all time. The kernel's launch has patched triton.language; what else a
    function sees (triton.language.core, in Triton's own functions) is never restored, so once is enough."""
    seen = frozenset(value.__name__ for value in self.fn.__globals__.values() if value is tl or value is tl.core)
    if seen != {tl.__name__} and seen not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(seen)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = _call_device_function
