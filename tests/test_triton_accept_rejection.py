"""The Triton kernel accept_rejection under the interpreter: the reference's decisions."""

import pytest
import torch
from eagle_kernels import Accepted, reference
from eagle_kernels.triton import accept_rejection as launcher
from eagle_kernels.triton.accept_rejection import accept_rejection
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused
from test_accept import max_depth_of
from test_accept_rejection import make_inputs

pytestmark = pytest.mark.usefixtures("checked_launches")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per row although the vocabularies are small."""
    monkeypatch.setitem(launcher.CONSTANTS, "BLOCK", 64)


def result_of(batch: int, max_depth: int) -> Accepted:
    """Poison where the result will be."""
    return Accepted(torch.full((batch, max_depth + 1), -77, dtype=torch.int32), torch.full((batch,), -77, dtype=torch.int32), torch.full((batch,), -77))


def check(inputs: dict[str, torch.Tensor], max_depth: int) -> Accepted:
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    accepted = result_of(inputs["tokens"].shape[0], max_depth)
    accept_rejection(*inputs.values(), *accepted)
    for tensor, expected in zip(accepted, reference.accept_rejection(**inputs, max_depth=max_depth)):
        assert_exact(tensor, expected)
    for name, tensor in inputs.items():
        assert_exact(tensor, before[name])
    return accepted


@pytest.mark.parametrize("zeros", [0.0, 0.4], ids=["dense", "sparse"])
@pytest.mark.parametrize("branching", ["random", "chain", "star", "deep"])
@pytest.mark.parametrize(
    "batch, num_nodes, vocab_size", [(2, 1, 5), (4, 10, 7), (3, 26, 150), pytest.param(2, 64, 500, marks=pytest.mark.slow), pytest.param(1, 256, 40, marks=pytest.mark.slow)]
)
def test_matches_reference(batch: int, num_nodes: int, vocab_size: int, branching: str, zeros: float) -> None:
    inputs = make_inputs(batch, num_nodes, vocab_size, branching, zeros)
    depth = max_depth_of(inputs["parent"])
    check(inputs, depth + 1)
    if depth > 1:
        check(inputs, depth // 2)


def test_special_rows() -> None:
    inputs = make_inputs(8, 6, 5, "star", 0.0)
    inputs["active"][:] = True
    inputs["target_probs"][0] = torch.nan
    inputs["target_probs"][1] = 0
    inputs["draft_probs"][2] = 0
    inputs["draft_probs"][3] = torch.nan
    inputs["tokens"][4, 1:4] = torch.tensor([-1, 2, 2])  # a filler node, and duplicate siblings
    inputs["target_probs"][5] = inputs["draft_probs"][5]  # no residual mass
    inputs["active"][6] = False
    accepted = check(inputs, 2)
    assert accepted.bonus_token[[1, 6]].tolist() == [-1, -1]


def test_as_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launcher.CONSTANTS, "BLOCK", 2048)
    check(make_inputs(1, 5, 2100, "star", 0.0), 3)


def test_tokens_outside_the_vocabulary_are_passed_over() -> None:
    inputs = make_inputs(2, 4, 9, "star", 0.0)
    inputs["active"][:] = True
    inputs["tokens"][:, 1:] = torch.tensor([[9, 2**62, -1], [2**31, 2**32, -(2**63)]])
    accepted = result_of(2, 1)
    accept_rejection(*inputs.values(), *accepted)
    assert accepted.accepted_nodes.tolist() == [[0, -1]] * 2 and accepted.bonus_token.ge(0).all()


def test_a_sequence_does_not_depend_on_its_company_and_empty() -> None:
    inputs = make_inputs(5, 8, 9, "random", 0.0)
    together = check(inputs, 4)
    for rows in (slice(0, 1), slice(2, 4), slice(0, 0)):
        for tensor, expected in zip(check({name: tensor[rows] for name, tensor in inputs.items()}, 4), together):
            assert_exact(tensor, expected[rows])


def test_bad_input_is_named() -> None:
    inputs = make_inputs(2, 4, 9, "random", 0.0)
    arguments = inputs | result_of(2, 3)._asdict()
    assert_bad_tensors_refused(accept_rejection, arguments, list(arguments), first="tokens")
    for name in inputs:
        if name != "tokens":
            assert_refused(name, lambda: accept_rejection(**(arguments | {name: inputs[name][:1]})))
    assert_refused("draft_probs", lambda: accept_rejection(**(arguments | {"draft_probs": inputs["draft_probs"][..., :8].contiguous()})))
    assert_refused("accepted_nodes", lambda: accept_rejection(**(arguments | {"accepted_nodes": torch.empty(2, 0, dtype=torch.int32)})))
    for nodes in (0, 257):
        assert_refused("tokens", lambda: accept_rejection(**(arguments | {"tokens": torch.zeros(2, nodes, dtype=torch.int64)})))
