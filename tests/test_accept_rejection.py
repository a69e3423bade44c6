"""accept_rejection against its reference, and the output distribution it must leave untouched."""

import random
from collections.abc import Callable

import pytest
import torch
from eagle_kernels import Accepted, accept_rejection, reference
from eagle_kernels.reference.accept_rejection import normalise
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, depths, random_tree
from test_accept import max_depth_of
from test_sample import LEVEL, chi_square_pvalue


def random_probs(*shape: int, zeros: float = 0.0) -> torch.Tensor:
    logits = torch.randn(shape) * 1.5
    return torch.where(torch.rand(shape) < zeros, -torch.inf, logits).softmax(-1).nan_to_num(1 / shape[-1])


def draw_children(parent: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Tokens [B, N]: the children of each node drawn without replacement from its draft distribution; -1 once it is exhausted."""
    batch, num_nodes, _ = draft_probs.shape
    tokens = torch.zeros(batch, num_nodes, dtype=torch.int64)
    for b in range(batch):
        left = draft_probs[b].clone()
        for node in range(1, num_nodes):
            row = left[int(parent[b, node])]
            token = int(torch.multinomial(row, 1)) if row.sum() > 0 else -1
            tokens[b, node] = token
            if token >= 0:
                row[token] = 0
    return tokens


def make_inputs(batch: int, num_nodes: int, vocab_size: int, branching: str, zeros: float) -> dict[str, torch.Tensor]:
    parent = random_tree(batch, num_nodes, branching)
    draft_probs = random_probs(batch, num_nodes, vocab_size, zeros=zeros)
    # Near the draft's distribution, so that paths grow long.
    target_probs = (draft_probs + 0.5 * random_probs(batch, num_nodes, vocab_size, zeros=zeros)) / 1.5
    return {
        "tokens": draw_children(parent, draft_probs),
        "parent": parent,
        "target_probs": target_probs,
        "draft_probs": draft_probs,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,)),
        "positions": torch.randint(0, 100000, (batch,)),
        "active": torch.rand(batch) < 0.9,
    }


def check(inputs: dict[str, torch.Tensor], max_depth: int) -> Accepted:
    accepted = accept_rejection(**inputs, max_depth=max_depth)
    for tensor, expected in zip(accepted, reference.accept_rejection(**inputs, max_depth=max_depth)):
        assert_exact(tensor, expected)
    return accepted


@pytest.mark.parametrize("zeros", [0.0, 0.4], ids=["dense", "sparse"])
@pytest.mark.parametrize("branching", ["random", "chain", "star", "deep"])
@pytest.mark.parametrize("batch, num_nodes, vocab_size", [(20, 1, 5), (30, 2, 8), (20, 10, 7), (6, 26, 33), (2, 64, 500)])
def test_matches_reference(batch: int, num_nodes: int, vocab_size: int, branching: str, zeros: float, isa: str) -> None:
    inputs = make_inputs(batch, num_nodes, vocab_size, branching, zeros)
    check(inputs, max_depth_of(inputs["parent"]) + random.randrange(2))


def test_special_rows_match_reference(isa: str) -> None:
    inputs = make_inputs(8, 6, 5, "star", 0.0)
    inputs["active"][:] = True
    inputs["target_probs"][0] = torch.nan
    inputs["target_probs"][1] = 0
    inputs["draft_probs"][2] = 0
    inputs["draft_probs"][3] = torch.nan
    inputs["tokens"][4, 1:4] = torch.tensor([-1, 2, 2])  # a filler node, and duplicate siblings
    inputs["target_probs"][5] = inputs["draft_probs"][5]  # no residual mass
    accepted = check(inputs, 2)
    assert accepted.bonus_token[1] == -1 and accepted.num_accepted_drafts[1] == 0
    assert accepted.num_accepted_drafts[5] == 1


def test_a_filler_node_changes_nothing(isa: str) -> None:
    """A child without a token was not drawn from the draft's distribution: the ones after it are judged as if alone."""
    inputs = make_inputs(400, 2, 6, "star", 0.0)
    with_filler = {name: tensor.clone() for name, tensor in inputs.items()}
    with_filler["tokens"][:, 1] = -1
    leaf = {name: tensor[:, :1].contiguous() if tensor.dim() > 1 else tensor for name, tensor in inputs.items()}
    for tensor, expected in zip(accept_rejection(**with_filler, max_depth=1), accept_rejection(**leaf, max_depth=1)):
        assert_exact(tensor, expected)


def emitted_first(accepted: Accepted, tokens: torch.Tensor) -> torch.Tensor:
    """The first token after the root."""
    child = accepted.accepted_nodes[:, 1].long()
    return torch.where(child >= 0, tokens.gather(1, child.clamp(min=0)[:, None])[:, 0], accepted.bonus_token)


def star_inputs(num_rows: int, target: torch.Tensor, draft: torch.Tensor, num_children: int) -> dict[str, torch.Tensor]:
    """The same two distributions in every row; only the children drawn and the seeds differ."""
    num_nodes, vocab_size = num_children + 1, target.numel()
    children = torch.multinomial(draft.expand(num_rows, -1), num_children)  # without replacement
    return {
        "tokens": torch.cat((torch.zeros(num_rows, 1, dtype=torch.int64), children), 1),
        "parent": torch.tensor([-1] + [0] * num_children, dtype=torch.int32).repeat(num_rows, 1),
        "target_probs": target.expand(num_rows, num_nodes, vocab_size).contiguous(),
        "draft_probs": draft.expand(num_rows, num_nodes, vocab_size).contiguous(),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,)),
        "positions": torch.full((num_rows,), 41),
        "active": torch.ones(num_rows, dtype=torch.bool),
    }


DISTRIBUTIONS = {
    "close": ([0.35, 0.25, 0.2, 0.15, 0.05], [0.3, 0.3, 0.2, 0.1, 0.1]),
    "opposed": ([0.02, 0.08, 0.2, 0.3, 0.4], [0.5, 0.25, 0.15, 0.05, 0.05]),
    "target_filtered": ([0.6, 0.4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.2, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]),
    "draft_filtered": ([0.2, 0.1, 0.2, 0.1, 0.2, 0.2], [0.1, 0.2, 0.3, 0.4, 0.0, 0.0]),
}


@pytest.mark.parametrize("num_children", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_first_token_follows_the_target(name: str, num_children: int) -> None:
    target, draft = (torch.tensor(values) for values in DISTRIBUTIONS[name])
    inputs = star_inputs(20000, target, draft, num_children)
    accepted = accept_rejection(**inputs, max_depth=1)
    assert 0 < accepted.num_accepted_drafts.float().mean() < 1
    assert chi_square_pvalue(emitted_first(accepted, inputs["tokens"]), target) > LEVEL


def test_one_child_is_accepted_as_often_as_published() -> None:
    """Acceptance probability 1 - total variation distance."""
    target, draft = (torch.tensor(values) for values in DISTRIBUTIONS["opposed"])
    accepted = accept_rejection(**star_inputs(20000, target, draft, 1), max_depth=1)
    overlap = torch.minimum(target, draft).sum()
    assert chi_square_pvalue(accepted.num_accepted_drafts.long(), torch.stack((1 - overlap, overlap))) > LEVEL


def test_deeper_tokens_follow_the_target() -> None:
    """A chain of two: pairs (first, second) where the second was judged at its own node."""
    num_rows, vocab_size = 40000, 4
    target, draft = random_probs(3, vocab_size), random_probs(3, vocab_size)
    inputs = star_inputs(num_rows, target[0], draft[0], 1)
    second = torch.multinomial(draft[1].expand(num_rows, -1), 1)
    inputs |= {
        "tokens": torch.cat((inputs["tokens"], second), 1),
        "parent": torch.tensor([[-1, 0, 1]], dtype=torch.int32).repeat(num_rows, 1),
        "target_probs": target.repeat(num_rows, 1, 1),
        "draft_probs": draft.repeat(num_rows, 1, 1),
    }
    accepted = accept_rejection(**inputs, max_depth=2)
    reached = accepted.num_accepted_drafts >= 1
    assert reached.sum() > 5000
    emitted = torch.where(accepted.num_accepted_drafts == 2, second[:, 0], accepted.bonus_token)[reached]
    assert chi_square_pvalue(emitted, target[1]) > LEVEL
    last = accepted.bonus_token[accepted.num_accepted_drafts == 2]
    assert chi_square_pvalue(last, target[2]) > LEVEL
    # The noise of the steps is independent: the last token does not depend on the second.
    both = second[:, 0][accepted.num_accepted_drafts == 2] * vocab_size + last
    marginal = torch.bincount(second[:, 0][accepted.num_accepted_drafts == 2], minlength=vocab_size) / last.numel()
    assert chi_square_pvalue(both, (marginal[:, None] * target[2]).flatten()) > LEVEL


def first_token_with(residual: Callable[..., tuple[list[float], list[float]]], inputs: dict[str, torch.Tensor], strict_q: bool = True) -> torch.Tensor:
    """The published rule with torch's own random numbers and any residual: (p, q, token) -> (p, q)."""
    emitted = []
    for tokens, target, draft in zip(inputs["tokens"].tolist(), inputs["target_probs"][:, 0].tolist(), inputs["draft_probs"][:, 0].tolist()):
        p, q = target, draft
        for token in tokens[1:]:
            if random.random() * q[token] < p[token]:
                emitted.append(token)
                break
            p, q = residual(p, q, token)
        else:
            emitted.append(random.choices(range(len(p)), weights=p)[0])
    return torch.tensor(emitted)


def without(q: list[float], token: int) -> list[float]:
    return [0.0 if i == token else value for i, value in enumerate(q)]


def difference(p: list[float], q: list[float]) -> list[float]:
    return [max(0.0, pi - qi) for pi, qi in zip(p, q)]


def right_residual(p: list[float], q: list[float], token: int) -> tuple[list[float], list[float]]:
    return normalise(difference(p, q), p), normalise(without(q, token), q)


WRONG_RESIDUALS = {
    "p_instead_of_p_minus_q": lambda p, q, token: (p, normalise(without(q, token), q)),
    "p_not_renormalised": lambda p, q, token: (difference(p, q), normalise(without(q, token), q)),
    "q_not_renormalised": lambda p, q, token: (normalise(difference(p, q), p), without(q, token)),
    "q_still_holds_the_token": lambda p, q, token: (normalise(difference(p, q), p), q),
}


@pytest.mark.parametrize("name", WRONG_RESIDUALS)
def test_a_wrong_residual_fails_the_same_check(name: str) -> None:
    target, draft = (torch.tensor(values) for values in DISTRIBUTIONS["opposed"])
    inputs = star_inputs(20000, target, draft, 3)
    assert chi_square_pvalue(first_token_with(right_residual, inputs), target) > LEVEL
    assert chi_square_pvalue(first_token_with(WRONG_RESIDUALS[name], inputs), target) < LEVEL


def test_inputs_are_left_alone_and_empty_batch(isa: str) -> None:
    inputs = make_inputs(5, 8, 9, "random", 0.0)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    accept_rejection(**inputs, max_depth=7)
    for name, tensor in inputs.items():
        assert_exact(tensor, before[name])
    accepted = accept_rejection(**{name: tensor[:0] for name, tensor in inputs.items()}, max_depth=7)
    assert accepted.accepted_nodes.shape == (0, 8) and accepted.bonus_token.shape == (0,)


def test_bad_input_is_named() -> None:
    inputs = make_inputs(2, 4, 9, "random", 0.0)
    call = lambda **tensors: accept_rejection(max_depth=max(map(max, map(depths, inputs["parent"].tolist()))), **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, inputs, list(inputs), first="tokens")
    for name in inputs:
        if name != "tokens":
            assert_refused(name, lambda: call(**(inputs | {name: inputs[name][:1]})))
    assert_refused("draft_probs", lambda: call(**(inputs | {"draft_probs": inputs["draft_probs"][..., :8].contiguous()})))
