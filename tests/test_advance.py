"""advance, native and in Triton, against its reference."""

import random

import pytest
import torch
from eagle_kernels import Accepted, advance, reference
from eagle_kernels.triton.advance import advance as triton_advance
from helpers import assert_bad_tensors_refused, assert_exact

NAMES = ("tokens", "features", "active", "seq_lens", "root_tokens", "num_pending", "pending_tokens", "pending_features")
MISSED = ("num_missed", "missed_tokens", "missed_features")


def make_arguments(batch: int, nodes: int, width: int, hidden: int, dtype: torch.dtype = torch.float32) -> dict:
    accepted = Accepted(torch.full((batch, width), -1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32), torch.randint(0, 99, (batch,)))
    for b in range(batch):
        path = [0, *sorted(random.sample(range(1, nodes), random.randint(0, min(nodes, width) - 1)))]
        accepted.accepted_nodes[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
        accepted.num_accepted_drafts[b] = len(path) - 1
    active = torch.rand(batch) < 0.7
    # What `accept` leaves for an inactive row; that of a row which a stop token has just made inactive has its path.
    before = ~active & (torch.rand(batch) < 0.5)
    accepted.accepted_nodes[before], accepted.num_accepted_drafts[before], accepted.bonus_token[before] = -1, 0, -1
    return {
        "tokens": torch.randint(0, 99, (batch, nodes)), "features": torch.randn(batch, nodes, hidden).to(dtype), "accepted": accepted, "active": active,
        "seq_lens": torch.randint(0, 1000, (batch,), dtype=torch.int32), "root_tokens": torch.full((batch,), -5), "num_pending": torch.full((batch,), -5),
        "pending_tokens": torch.full((batch, width), -5), "pending_features": torch.full((batch, width, hidden), float("nan"), dtype=dtype),
    }  # fmt: skip


def add_missed(arguments: dict) -> dict:
    """With room for the pending pairs of active rows, to the last place of it; those of an inactive one may be anything."""
    pending, active = arguments["pending_tokens"], arguments["active"]
    (batch, width), dtype = pending.shape, arguments["features"].dtype
    counts, most = torch.randint(1, width + 1, (batch,)), 2 * width + 3
    missed = torch.where(active, torch.where(torch.rand(batch) < 0.5, most - counts, torch.randint(0, width + 3, (batch,))), 10**12)
    return arguments | {
        "num_pending": torch.where(active, counts, -(10**12)), "pending_tokens": torch.randint(0, 99, (batch, width)),
        "pending_features": torch.randn(arguments["pending_features"].shape).to(dtype), "num_missed": missed, "missed_tokens": torch.full((batch, most), -5),
        "missed_features": torch.full((batch, most, arguments["features"].shape[2]), float("nan"), dtype=dtype),
    }  # fmt: skip


def copied(arguments: dict) -> dict:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


CASES = [(0, 3, 2, 4), (1, 1, 1, 1), (1, 9, 4, 1030), (5, 30, 7, 33), (2, 256, 65, 16), (3, 5, 6, 24)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("keeps", [False, True], ids=["", "keeps-missed"])
def test_matches_reference(keeps: bool, backend: str, dtype: torch.dtype, case: tuple[int, int, int, int]) -> None:
    arguments = make_arguments(*case, dtype)
    if keeps:
        arguments = add_missed(arguments)
    expected = copied(arguments)
    reference.advance(**expected)
    if backend == "native":
        advance(**arguments)
    else:
        triton_advance(*(part for name, value in arguments.items() for part in (value if name == "accepted" else (value,))))
    for name in NAMES + (MISSED if keeps else ()):
        assert_exact(arguments[name], expected[name])


def test_bad_tensors_are_refused_by_name() -> None:
    arguments = make_arguments(2, 5, 3, 8)
    assert_bad_tensors_refused(advance, arguments, NAMES, any_dtype=("features",), first="tokens")
    with pytest.raises(ValueError, match=r"^pending_features: expected \[2, 3, 8\] bfloat16"):
        advance(**(arguments | {"features": arguments["features"].bfloat16()}))
    arguments = add_missed(arguments)
    assert_bad_tensors_refused(advance, arguments, (*NAMES, *MISSED), any_dtype=("features",), first="tokens")
    for name in MISSED:
        with pytest.raises(ValueError, match="expected all of them or none"):
            advance(**(arguments | {name: None}))


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_missed_pairs_past_the_end_are_not_written(backend: str) -> None:
    """Nobody may ask for it, and nobody's memory pays for it."""
    arguments = add_missed(make_arguments(3, 5, 3, 8))
    arguments |= {"active": torch.ones(3, dtype=torch.bool), "num_pending": torch.full((3,), 3), "num_missed": torch.tensor([0, 8, 40])}
    arguments["accepted"] = Accepted(torch.tensor([[0, -1, -1]] * 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
    pending = arguments["pending_tokens"].clone()
    (advance if backend == "native" else triton_advance)(*(part for name, value in arguments.items() for part in (value if name == "accepted" else (value,)) if backend == "triton"), **(arguments if backend == "native" else {}))
    expected = torch.full((3, 9), -5)
    expected[0, :3], expected[1, 8:] = pending[0], pending[1, :1]
    assert_exact(arguments["missed_tokens"], expected)
