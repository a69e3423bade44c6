"""copy_rows against its reference: bytes, and nothing beside the rows."""

import pytest
import torch
from eagle_kernels import copy_rows, linear, pack_weight, record, reference
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def values(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, size) * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, size", [(0, 4), (1, 1), (5, 48), (33, 7)])
def test_matches_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    """Into the middle of a wider matrix, from a matrix and from every second row of one."""
    for x in (values(rows, size, dtype), values(2 * rows, size, dtype)[::2]):
        wide = values(rows, 3 * size, dtype)
        expected = wide.clone()
        reference.copy_rows(x, expected[:, size : 2 * size])
        copy_rows(x, wide[:, size : 2 * size])
        assert_exact(wide, expected)


def test_poison_is_copied_as_it_is() -> None:
    x = torch.tensor([[float("nan"), -0.0, float("inf")]])
    out = torch.zeros(1, 3)
    copy_rows(x, out)
    assert_exact(out, x)


def test_bad_tensors_are_refused() -> None:
    arguments = {"x": torch.randn(3, 8), "out": torch.empty(3, 8)}
    assert_bad_tensors_refused(copy_rows, arguments, ["x", "out"], any_dtype=["x"], first="x")
    assert_refused("out", lambda: copy_rows(torch.randn(3, 8), torch.empty(3, 9)))
    assert_refused("out", lambda: copy_rows(torch.randn(3, 8), torch.empty(2, 8)))


def test_a_recording_copies_what_is_there_now() -> None:
    weight, x, out = pack_weight(torch.randn(16, 16)), torch.randn(4, 16), torch.zeros(4, 32)
    with record() as recording:
        copy_rows(linear(x, weight), out[:, 16:])
    assert len(recording) == 2
    x.copy_(torch.randn(4, 16))
    recording.replay()
    assert_exact(out[:, 16:].contiguous(), linear(x, weight))
    assert not out[:, :16].any()
