"""expand against its reference: tokens, parents and masks exactly, scores closely, the choice exactly given the scores."""

from dataclasses import dataclass

import pytest
import torch
from eagle_kernels import DraftPool, Frontier, expand, reference
from eagle_kernels.reference.expand import best_by_score
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, strided_copy
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    batch: int
    frontier_size: int
    vocab_size: int
    top_k: int
    next_size: int
    num_words: int = 1
    first_row: int = 1
    hidden_size: int = 5
    kind: str = "random"
    mapped: bool = False
    static: bool = False

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in vars(self).items())


CASES = [
    Case(1, 1, 50, 10, 10),
    Case(2, 10, 501, 10, 10, first_row=11),
    Case(3, 4, 64, 4, 4, kind="ties"),
    Case(2, 4, 65, 4, 4, kind="equal"),
    Case(1, 3, 7, 7, 21),
    Case(1, 1, 5, 1, 1),
    Case(1, 1, 1, 1, 1),
    Case(2, 8, 1000, 8, 0, first_row=17),
    Case(2, 8, 100, 8, 20, num_words=2, first_row=50, hidden_size=64),
    Case(1, 10, 100, 10, 10, num_words=4, first_row=246),
    Case(2, 10, 100, 10, 10, mapped=True),
    Case(2, 3, 100, 8, 9, static=True),
    Case(2, 3, 100, 8, 9, kind="ties", static=True, mapped=True),
    Case(1, 2, 49153, 10, 10),
    Case(1, 10, 2000, 10, 10, kind="wide"),
]


def make_inputs(case: Case) -> tuple[dict[str, object], int]:
    """Arguments of expand; the pool has room before and behind the candidates, filled with poison."""
    shape = (case.batch, case.frontier_size)
    logits = torch.randn(*shape, case.vocab_size) * 3
    scores = -torch.rand(shape) * 4
    if case.kind == "ties":
        logits, scores = logits.round(), scores.round()
    if case.kind == "equal":
        logits, scores = torch.full_like(logits, 2.5), torch.zeros(shape)
    if case.kind == "wide":
        logits = logits * 30
    pool_offset, num_candidates = 13, case.frontier_size * case.top_k
    pool_size = pool_offset + num_candidates + 3
    pool = DraftPool(
        tokens=torch.full((case.batch, pool_size), -9),
        scores=torch.full((case.batch, pool_size), float("nan")),
        parents=torch.full((case.batch, pool_size), -9, dtype=torch.int32),
    )
    arguments = {
        "logits": logits,
        "frontier_scores": scores,
        "frontier_pool_index": torch.randint(-1, pool_offset, shape, dtype=torch.int32),
        "features": torch.randn(*shape, case.hidden_size),
        "frontier_mask": torch.randint(-(2**63), 2**63 - 1, (*shape, case.num_words)),
        "pool": pool,
        "pool_offset": pool_offset,
        "top_k": case.top_k,
        "first_row": case.first_row,
        "next_size": case.next_size,
    }
    for j in range(case.next_size):  # bits of rows that are written by this call are clear before it
        row = case.first_row + j
        arguments["frontier_mask"][..., row // 64] &= ~(torch.tensor(1) << (row % 64))
    if case.mapped:
        arguments["draft_to_target"] = torch.randperm(10 * case.vocab_size)[: case.vocab_size]
    if case.static:
        arguments["choices"] = torch.randperm(num_candidates)[: case.next_size].int()
    return arguments, num_candidates


def clone_arguments(arguments: dict[str, object]) -> dict[str, object]:
    return arguments | {"pool": DraftPool(*(tensor.clone() for tensor in arguments["pool"]))}


def check(arguments: dict[str, object], num_candidates: int) -> None:
    expected_arguments = clone_arguments(arguments)
    expected = reference.expand(**expected_arguments)
    result = expand(**arguments)
    pool, expected_pool = arguments["pool"], expected_arguments["pool"]
    offset, next_size = arguments["pool_offset"], arguments["next_size"]

    assert_exact(pool.tokens, expected_pool.tokens)
    assert_exact(pool.parents, expected_pool.parents)
    written = slice(offset, offset + num_candidates)
    torch.testing.assert_close(pool.scores[:, written], expected_pool.scores[:, written], rtol=5e-7, atol=5e-7, equal_nan=True)
    assert_exact(pool.scores[:, :offset], expected_pool.scores[:, :offset])
    assert_exact(pool.scores[:, offset + num_candidates :], expected_pool.scores[:, offset + num_candidates :])

    # The order follows the scores as computed: near-ties may be ordered differently in double precision.
    for b in range(pool.tokens.shape[0]):
        if arguments.get("choices") is not None:
            chosen = arguments["choices"]
        else:
            chosen = torch.tensor(best_by_score(pool.scores[b, written].tolist(), next_size), dtype=torch.int32)
        assert_exact(result.pool_index[b], chosen + offset)
        slots = result.pool_index[b].long()
        parents = (chosen // arguments["top_k"]).long()
        assert_exact(result.tokens[b], pool.tokens[b, slots])
        assert_exact(result.scores[b], pool.scores[b, slots])
        assert_exact(result.features[b], arguments["features"][b, parents])
        own_bit = torch.zeros(next_size, 64 * result.mask.shape[-1], dtype=torch.bool)
        own_bit[torch.arange(next_size), arguments["first_row"] + torch.arange(next_size)] = True
        assert_exact(result.mask[b], arguments["frontier_mask"][b, parents] | reference.pack_ancestor_mask(own_bit))
    for name, tensor, other in zip(Frontier._fields, result, expected):
        assert tensor.shape == other.shape and tensor.dtype == other.dtype, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: Case, isa: str) -> None:
    arguments, num_candidates = make_inputs(case)
    check(arguments, num_candidates)


@pytest.mark.parametrize("kind", ["ties", "equal"])
def test_exact_ties_keep_the_smaller_index(kind: str, isa: str) -> None:
    """Rows that are permutations of one another give bit-equal scores only if the sum does not depend on the order;
    equal rows give them always, and the reference's choice must then be the kernel's."""
    arguments, _ = make_inputs(Case(2, 6, 40, 5, 12, kind=kind))
    arguments["logits"][:] = arguments["logits"][:1, :1]
    arguments["frontier_scores"][:] = -1.5
    expected_arguments = clone_arguments(arguments)
    expected, result = reference.expand(**expected_arguments), expand(**arguments)
    assert_exact(result.pool_index, expected.pool_index)
    assert_exact(result.tokens, expected.tokens)
    assert_exact(result.mask, expected.mask)


special_values = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, 3e38, -3e38, float("inf"), -float("inf"), float("nan")])


@given(
    rows=st.lists(st.lists(special_values, min_size=9, max_size=9), min_size=3, max_size=3),
    scores=st.lists(st.sampled_from([0.0, -1.0, -1.0, -float("inf"), float("nan")]), min_size=3, max_size=3),
    top_k=st.integers(1, 9),
)
def test_special_values(isa: str, rows: list[list[float]], scores: list[float], top_k: int) -> None:
    arguments, num_candidates = make_inputs(Case(1, 3, 9, top_k, 5 if top_k > 1 else 3))
    arguments["logits"] = torch.tensor([rows])
    arguments["frontier_scores"] = torch.tensor([scores])
    check(arguments, num_candidates)


def test_rows_of_minus_infinity(isa: str) -> None:
    arguments, _ = make_inputs(Case(1, 2, 20, 4, 4))
    arguments["logits"][0, 0] = -float("inf")
    arguments["logits"][0, 1] = float("nan")
    expand(**arguments)
    written = slice(13, 21)
    assert arguments["pool"].tokens[0, written].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert arguments["pool"].scores[0, written].tolist() == [-float("inf")] * 8


def test_scores_never_rise_above_the_parent(isa: str) -> None:
    """A one-sided row has log-probability 0 after rounding; a child must not beat its parent."""
    arguments, _ = make_inputs(Case(4, 8, 300, 3, 3))
    arguments["logits"][..., 7] += 200
    expand(**arguments)
    scores = arguments["pool"].scores[:, 13 : 13 + 24].unflatten(1, (8, 3))
    assert (scores <= arguments["frontier_scores"][..., None]).all()
    assert_exact(scores[..., 0], arguments["frontier_scores"])


def test_strided_logits(isa: str) -> None:
    arguments, _ = make_inputs(Case(2, 4, 50, 4, 4))
    other = clone_arguments(arguments) | {"logits": strided_copy(arguments["logits"])}
    for tensor, expected in zip(expand(**other), expand(**arguments)):
        assert_exact(tensor, expected)


def test_empty_batch(isa: str) -> None:
    arguments, _ = make_inputs(Case(0, 4, 50, 4, 6))
    result = expand(**arguments)
    assert result.tokens.shape == (0, 6) and result.mask.shape == (0, 6, 1) and result.features.shape == (0, 6, 5)


def test_bad_input_is_named() -> None:
    arguments, _ = make_inputs(Case(2, 4, 50, 4, 6, mapped=True, static=True))
    names = ["logits", "frontier_scores", "frontier_pool_index", "features", "frontier_mask", "draft_to_target", "choices"]
    assert_bad_tensors_refused(expand, arguments, names, first="logits")
    for name, tensor in [
        ("frontier_scores", arguments["frontier_scores"][:, :3].contiguous()),
        ("frontier_pool_index", arguments["frontier_pool_index"][:1]),
        ("features", arguments["features"][:, :3].contiguous()),
        ("frontier_mask", arguments["frontier_mask"][:, :3].contiguous()),
        ("draft_to_target", arguments["draft_to_target"][:49]),
        ("choices", arguments["choices"][:5]),
    ]:
        assert_refused(name, lambda: expand(**(arguments | {name: tensor})))
    pool = arguments["pool"]
    for field in DraftPool._fields:
        tensor = getattr(pool, field)
        for bad in (tensor.double(), tensor[:1], tensor[:, :-1].contiguous()[:, :20], tensor.to("meta")):
            with pytest.raises(ValueError, match=rf"pool\.\w+: expected"):
                expand(**(arguments | {"pool": pool._replace(**{field: bad})}))
    for name, value in [("top_k", 0), ("top_k", 51), ("pool_offset", -1), ("pool_offset", 17), ("next_size", 17), ("first_row", 60)]:
        with pytest.raises(ValueError, match=name):
            expand(**({key: item for key, item in arguments.items() if key != "choices"} | {name: value}))
