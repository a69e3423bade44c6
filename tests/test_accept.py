"""accept against its reference; sample-exact decoding's output distribution."""

import random
from collections.abc import Callable

import pytest
import torch
from eagle_kernels import Accepted, accept, reference, sample
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, depths, parents_strategy, path_to_root, random_tree
from hypothesis import given
from hypothesis import strategies as st
from test_sample import LEVEL, chi_square_pvalue, filter_rows, neutral


def max_depth_of(parent: torch.Tensor) -> int:
    return max((max(depths(row)) for row in parent.tolist()), default=0)


def check(tokens: torch.Tensor, parent: torch.Tensor, sampled: torch.Tensor, active: torch.Tensor, max_depth: int) -> None:
    accepted = accept(tokens, parent, sampled, active, max_depth)
    expected = reference.accept(tokens, parent, sampled, active, max_depth)
    for tensor, other in zip(accepted, expected):
        assert_exact(tensor, other)
    for b in range(tokens.shape[0]):
        count = int(accepted.num_accepted_drafts[b])
        nodes = accepted.accepted_nodes[b].tolist()
        if not active[b]:
            assert nodes == [-1] * (max_depth + 1) and count == 0 and accepted.bonus_token[b] == -1
            continue
        path = nodes[: count + 1]
        assert path == path_to_root(parent[b].tolist(), path[-1]) and nodes[count + 1 :] == [-1] * (max_depth - count)
        assert [int(tokens[b, c]) for c in path[1:]] == [int(sampled[b, c]) for c in path[:-1]]
        assert accepted.bonus_token[b] == sampled[b, path[-1]]


@pytest.mark.parametrize("branching", ["random", "chain", "star", "deep"])
@pytest.mark.parametrize("batch, num_nodes, vocab_size", [(1, 1, 3), (3, 2, 2), (5, 26, 3), (4, 64, 2), (3, 65, 2), (2, 256, 2), (4, 60, 1)])
def test_matches_reference(batch: int, num_nodes: int, vocab_size: int, branching: str, isa: str) -> None:
    """Small vocabularies: long paths, and duplicate siblings of which the first must win."""
    parent = random_tree(batch, num_nodes, branching)
    tokens, sampled = torch.randint(0, vocab_size, (2, batch, num_nodes))
    active = torch.rand(batch) < 0.8
    check(tokens, parent, sampled, active, max_depth_of(parent) + random.randrange(3))


def check_options(batch: int, num_nodes: int, vocab_size: int, max_depth: int, num_stop_tokens: int, ring_size: int | None, run: Callable[..., Accepted]) -> None:
    """`run` against the reference with stop tokens and a ring, over four steps of one ring; rows that have stopped stay as they are."""
    active = torch.rand(batch) < 0.9
    stop_token_ids = torch.randint(-1, 3 * vocab_size, (batch, num_stop_tokens)) if num_stop_tokens >= 0 else None
    ring = None if ring_size is None else torch.cat((torch.full((batch, ring_size), -9), torch.randint(0, 100, (batch, 1))), 1)
    other_active, other_ring = active.clone(), None if ring is None else ring.clone()
    for _ in range(4):
        parent = random_tree(batch, num_nodes)
        tokens, sampled = torch.randint(-1, vocab_size, (2, batch, num_nodes))
        before = [tokens.clone(), parent.clone(), sampled.clone(), None if stop_token_ids is None else stop_token_ids.clone()]
        accepted = run(tokens, parent, sampled, active, max_depth, stop_token_ids=stop_token_ids, output_ring=ring)
        expected = reference.accept(tokens, parent, sampled, other_active, max_depth, stop_token_ids=stop_token_ids, output_ring=other_ring)
        for tensor, other in zip((*accepted, active, ring, tokens, parent, sampled, stop_token_ids), (*expected, other_active, other_ring, *before)):
            if tensor is not None:
                assert_exact(tensor, other)


OPTION_CASES = [(3, 1, 3, 0, 1, 1), (5, 26, 2, 6, 2, 7), (4, 64, 2, 5, 40, 6), (4, 65, 1, 8, 0, 30), (6, 40, 2, 7, 3, None), (3, 200, 2, 12, -1, 13)]


@pytest.mark.parametrize("batch, num_nodes, vocab_size, max_depth, num_stop_tokens, ring_size", OPTION_CASES)
def test_stop_tokens_and_ring_match_reference(batch: int, num_nodes: int, vocab_size: int, max_depth: int, num_stop_tokens: int, ring_size: int | None) -> None:
    check_options(batch, num_nodes, vocab_size, max_depth, num_stop_tokens, ring_size, accept)


def test_a_stop_token_ends_emission() -> None:
    """A chain accepted in full, stopped at each place in turn; the stop token becomes the bonus token."""
    tokens, parent, sampled = torch.arange(5)[None], random_tree(1, 5, "chain"), torch.arange(1, 6)[None]
    for stop in range(1, 6):
        active, ring = torch.tensor([True]), torch.tensor([[-9] * 5 + [3]])
        accepted = accept(tokens, parent, sampled, active, 4, stop_token_ids=torch.tensor([[-1, stop]]), output_ring=ring)
        assert accepted.num_accepted_drafts.tolist() == [stop - 1] and accepted.bonus_token.tolist() == [stop]
        assert accepted.accepted_nodes.tolist() == [[*range(stop), *[-1] * (5 - stop)]]
        assert active.tolist() == [False] and ring[0, -1] == 3 + stop
        assert [int(ring[0, (3 + n) % 5]) for n in range(stop)] == list(range(1, stop + 1))


def test_no_token_is_no_stop_token() -> None:
    """-1 pads the list; a row of NaN draws -1, which must not stop it here."""
    active = torch.tensor([True])
    accept(torch.tensor([[7]]), torch.tensor([[-1]], dtype=torch.int32), torch.tensor([[-1]]), active, 0, stop_token_ids=torch.tensor([[-1]]))
    assert active.tolist() == [True]


@given(parents=parents_strategy(30), data=st.data())
def test_any_tree(isa: str, parents: list[int], data: st.DataObject) -> None:
    values = st.lists(st.integers(-1, 2), min_size=len(parents), max_size=len(parents))
    tokens, sampled = torch.tensor([data.draw(values)]), torch.tensor([data.draw(values)])
    check(tokens, torch.tensor([parents], dtype=torch.int32), sampled, torch.tensor([True]), max(depths(parents)))


def test_no_token_matches_no_token(isa: str) -> None:
    """A NaN row samples -1; a filler node has token -1; they must not agree."""
    tokens, parent = torch.tensor([[7, -1, -1]]), torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    accepted = accept(tokens, parent, torch.tensor([[-1, 5, 5]]), torch.tensor([True]), 1)
    assert accepted.accepted_nodes.tolist() == [[0, -1]] and accepted.bonus_token.tolist() == [-1]


def test_deepest_path(isa: str) -> None:
    tokens, parent = torch.arange(9)[None], random_tree(1, 9, "chain")
    accepted = accept(tokens, parent, torch.arange(1, 10)[None], torch.tensor([True]), 8)
    assert accepted.accepted_nodes.tolist() == [list(range(9))]
    assert accepted.num_accepted_drafts.tolist() == [8] and accepted.bonus_token.tolist() == [9]


@pytest.mark.parametrize("filters", [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.8, "min_p": 0.05},
], ids=["plain", "filtered"])
def test_distribution_of_sample_exact_decoding(filters: dict[str, float]) -> None:
    """A tree over a two-token language: emitted pairs follow the product of the target's distributions, whatever the tree."""
    num_rows, vocab_size, base = 20000, 5, 100
    root_logits, child_logits = torch.randn(vocab_size), torch.randn(vocab_size, vocab_size)
    # Node 0 the root; nodes 1, 2 follow with tokens 3 and 0; node 3 is a child of node 1.
    tokens, parent = torch.tensor([9, 3, 0, 2]), torch.tensor([-1, 0, 0, 1], dtype=torch.int32)
    logits = torch.stack((root_logits, child_logits[3], child_logits[0], torch.randn(vocab_size)))
    depth = torch.tensor([0, 1, 1, 2])
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    sampled = sample(
        logits.repeat(num_rows, 1),
        **filter_rows(filters, 4 * num_rows),
        seeds=seeds.repeat_interleave(4),
        positions=(base + depth).repeat(num_rows),
    ).view(num_rows, 4)
    accepted = accept(tokens.repeat(num_rows, 1), parent.repeat(num_rows, 1), sampled, torch.ones(num_rows, dtype=torch.bool), 2)

    first = sampled[:, 0]
    # Where the tree ended after one token, plain decoding goes on with the same noise at the next position.
    plain = sample(child_logits[first], **filter_rows(filters, num_rows), seeds=seeds, positions=torch.full((num_rows,), base + 1))
    second = torch.where(
        accepted.num_accepted_drafts >= 1,
        sampled.gather(1, accepted.accepted_nodes[:, 1:2].clamp(min=0).long())[:, 0],
        plain,
    )
    assert_exact(second, plain)
    emitted = torch.where(accepted.num_accepted_drafts >= 1, tokens[accepted.accepted_nodes[:, 1].clamp(min=0).long()], accepted.bonus_token)
    assert_exact(emitted, first)
    probs = lambda rows: reference.filter_probs(rows, **filter_rows(filters, rows.shape[0]))  # noqa: E731
    joint = probs(root_logits[None])[0][:, None] * probs(child_logits)
    assert chi_square_pvalue(first * vocab_size + second, joint.flatten()) > LEVEL
    assert chi_square_pvalue(second * vocab_size + first, joint.flatten()) < LEVEL  # the test can tell


def test_acceptance_probability_is_that_of_the_token() -> None:
    num_rows = 20000
    logits = torch.tensor([[1.0, 0.2, -0.5, 0.0]]).expand(num_rows, -1).contiguous()
    sampled = sample(logits, **neutral(num_rows))
    tokens = torch.tensor([[0, 1]]).expand(num_rows, -1).contiguous()
    parent = torch.tensor([[-1, 0]], dtype=torch.int32).expand(num_rows, -1).contiguous()
    accepted = accept(tokens, parent, torch.stack((sampled, sampled), 1), torch.ones(num_rows, dtype=torch.bool), 1)
    p = logits[0].softmax(-1)[1]
    assert chi_square_pvalue(accepted.num_accepted_drafts.long(), torch.stack((1 - p, p))) > LEVEL


def test_empty_batch(isa: str) -> None:
    nothing = torch.zeros(0, 5, dtype=torch.int64)
    accepted = accept(nothing, nothing.int(), nothing, torch.zeros(0, dtype=torch.bool), 3)
    assert accepted.accepted_nodes.shape == (0, 4) and accepted.bonus_token.shape == (0,)


def test_bad_input_is_named() -> None:
    arguments = {
        "tokens": torch.zeros(2, 4, dtype=torch.int64),
        "parent": random_tree(2, 4),
        "sampled": torch.zeros(2, 4, dtype=torch.int64),
        "active": torch.ones(2, dtype=torch.bool),
    }
    call = lambda **tensors: accept(max_depth=3, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), first="tokens")
    arguments |= {"stop_token_ids": torch.zeros(2, 3, dtype=torch.int64), "output_ring": torch.zeros(2, 5, dtype=torch.int64)}
    assert_bad_tensors_refused(call, arguments, ["stop_token_ids", "output_ring"])
    for name in ("parent", "sampled", "active", "stop_token_ids", "output_ring"):
        assert_refused(name, lambda: call(**(arguments | {name: arguments[name][:1]})))
    assert_refused("output_ring", lambda: call(**(arguments | {"output_ring": torch.zeros(2, 4, dtype=torch.int64)})))
