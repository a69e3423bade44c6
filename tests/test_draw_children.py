"""draw_children against its reference; the distribution of draws without replacement."""

import itertools

import pytest
import torch
from eagle_kernels import accept_rejection, draw_children, filter_probs, reference
from helpers import assert_bad_tensors_refused, assert_exact, strided_copy
from test_accept_rejection import emitted_first
from test_sample import LEVEL, chi_square_pvalue, filter_rows, make_logits, make_parameters


@pytest.mark.parametrize("order", ["hf", "vllm"])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "wide"])
@pytest.mark.parametrize("vocab_size, count, lanes", [(1, 1, 1), (5, 5, 3), (8, 64, 1), (65, 10, 7), (1000, 64, 4)])
def test_matches_reference(vocab_size: int, count: int, lanes: int, kind: str, order: str, isa: str) -> None:
    logits, parameters = make_logits(20, vocab_size, kind), make_parameters(20, vocab_size)
    children = draw_children(logits, **parameters, count=count, lanes=lanes, order=order)
    assert_exact(children, reference.draw_children(logits, **parameters, count=count, lanes=lanes, order=order))
    for row in children.tolist():
        drawn = [token for token in row if token >= 0]
        assert len(set(drawn)) == len(drawn) and row == drawn + [-1] * (count - len(drawn))


def test_special_rows(isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0, nan, 1], [-inf, -inf, -inf], [0, inf, inf], [-inf, -inf, 2], [-inf, 1, 2]], dtype=torch.float32)
    rows = filter_rows({"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, 5)
    keys = {"seeds": torch.arange(5), "positions": torch.arange(5)}
    children = draw_children(logits, **rows, **keys, count=3)
    assert_exact(children, reference.draw_children(logits, **rows, **keys, count=3))
    assert children[:4].tolist() == [[-1, -1, -1], [-1, -1, -1], [1, -1, -1], [2, -1, -1]]
    assert sorted(children[4].tolist()) == [-1, 1, 2]
    rows["temperature"][:] = 0
    assert draw_children(logits, **rows, **keys, count=3)[:, 0].tolist() == [-1, -1, 1, 2, 2]


def test_lanes_draw_with_other_noise(isa: str) -> None:
    logits = torch.zeros(8, 100)
    rows = filter_rows({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, 8)
    keys = {"seeds": torch.full((8,), 3), "positions": torch.full((8,), 9)}
    children = draw_children(logits, **rows, **keys, count=20, lanes=4)
    assert_exact(children[:4], children[4:])
    assert all(children[a].ne(children[b]).any() for a, b in itertools.combinations(range(4), 2))


@pytest.mark.parametrize(
    "filters",
    [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.95, "min_p": 0.02}],
    ids=["plain", "filtered"],
)
def test_distribution_of_ordered_pairs(filters: dict[str, float]) -> None:
    """P(first, second) = p(first) p(second) / (1 - p(first))."""
    num_rows, vocab_size = 40000, 5
    logits = torch.randn(1, vocab_size)
    rows = filter_rows(filters, num_rows)
    probs = filter_probs(logits, *(rows[name][:1] for name in ("temperature", "top_k", "top_p", "min_p")))[0].double()
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (num_rows,)), torch.arange(num_rows)
    children = draw_children(logits.expand(num_rows, -1).contiguous(), **rows, seeds=seeds, positions=positions, count=2, lanes=5)
    joint = probs[:, None] * probs / (1 - probs)[:, None]
    joint.fill_diagonal_(0)
    pairs = children[:, 0] * vocab_size + children[:, 1]
    assert chi_square_pvalue(pairs, joint.flatten()) > LEVEL
    with_replacement = probs[:, None] * probs
    assert chi_square_pvalue(pairs, with_replacement.flatten()) < LEVEL  # the test can tell


def test_with_accept_rejection_the_first_token_follows_the_target() -> None:
    """The pair of ops that the engine uses, with the seeds that the engine shares between them."""
    num_rows, num_children = 20000, 3
    draft_logits, target = torch.tensor([[1.5, 0.5, 0.0, -0.5, -1.0]]), torch.tensor([0.05, 0.15, 0.2, 0.25, 0.35])
    rows = filter_rows({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, num_rows)
    keys = {"seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,)), "positions": torch.full((num_rows,), 12)}
    children = draw_children(draft_logits.expand(num_rows, -1).contiguous(), **rows, **keys, count=num_children)
    tokens = torch.cat((torch.zeros(num_rows, 1, dtype=torch.int64), children), 1)
    accepted = accept_rejection(
        tokens,
        torch.tensor([-1, 0, 0, 0], dtype=torch.int32).repeat(num_rows, 1),
        target.expand(num_rows, 4, 5).contiguous(),
        draft_logits.softmax(-1).expand(num_rows, 4, 5).contiguous(),
        **keys,
        active=torch.ones(num_rows, dtype=torch.bool),
        max_depth=1,
    )
    assert chi_square_pvalue(emitted_first(accepted, tokens), target) > LEVEL


def test_strided_out_and_empty(isa: str) -> None:
    logits, parameters = make_logits(9, 33, "random"), make_parameters(9, 33)
    expected = draw_children(logits, **parameters, count=4)
    assert_exact(draw_children(strided_copy(logits), **parameters, count=4), expected)
    out = torch.full((9, 4), -5)
    assert draw_children(logits, **parameters, count=4, out=out) is out
    assert_exact(out, expected)
    assert draw_children(logits[:0], **{name: tensor[:0] for name, tensor in parameters.items()}, count=4).shape == (0, 4)


def test_bad_input_is_named() -> None:
    arguments = {"logits": make_logits(4, 33, "random")} | make_parameters(4, 33) | {"out": torch.zeros(4, 3, dtype=torch.int64)}
    call = lambda **tensors: draw_children(count=3, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), first="logits")
    del arguments["out"]
    for change in ({"count": 0}, {"count": 65}, {"lanes": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            draw_children(**({"count": 3} | arguments | change))
    with pytest.raises(ValueError, match="order"):
        draw_children(**arguments, count=3, order="other")
