"""What the tests of Triton kernels under the interpreter share."""

from collections.abc import Iterator

import pytest
import torch
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
