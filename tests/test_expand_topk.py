"""expand_topk against its reference, byte for byte, and against expand on the logits that the keys were made of."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from eagle_kernels import DraftPool, HeadTopK, expand, expand_topk, reference
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, strided_copy
from hypothesis import given
from hypothesis import strategies as st

PADDING_KEY = -(2**63)
POOL_OFFSET = 13


def make_head(logits: torch.Tensor, tile_size: int, top_k: int) -> HeadTopK:
    """What head_topk keeps of logits [..., V] fp32, in tiles of tile_size."""
    logits = logits.masked_fill(logits.isnan(), -math.inf)
    num_tiles = -(-logits.shape[-1] // tile_size)
    tiles = torch.nn.functional.pad(logits, (0, num_tiles * tile_size - logits.shape[-1]), value=-math.inf).unflatten(-1, (num_tiles, tile_size))
    bits = (tiles + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(num_tiles * tile_size).view(num_tiles, tile_size)
    keys = torch.where(ids < logits.shape[-1], (ordered << 32) | (0xFFFFFFFF - ids), PADDING_KEY)
    keys = torch.nn.functional.pad(keys, (0, max(0, top_k - tile_size)), value=PADDING_KEY).sort(-1, descending=True).values[..., :top_k].contiguous()
    greatest = tiles.amax(-1)
    sum_exp = (tiles - greatest[..., None]).exp().sum(-1)
    sum_exp = torch.where(greatest == math.inf, 1.0, torch.where(greatest == -math.inf, 0.0, sum_exp))
    return HeadTopK(keys, greatest, sum_exp)


@dataclass(frozen=True)
class Case:
    batch: int
    frontier_size: int
    vocab_size: int
    tile_size: int
    top_k: int
    next_size: int
    num_words: int = 1
    first_row: int = 1
    hidden_size: int = 8
    kind: str = "random"
    dtype: torch.dtype = torch.float32
    mapped: bool = False
    static: bool = False

    def __str__(self) -> str:
        return "-".join(f"{name}{str(value).removeprefix('torch.')}" for name, value in vars(self).items())


CASES = [
    Case(1, 1, 50, 64, 10, 10),
    Case(2, 10, 501, 64, 10, 10, first_row=11, dtype=torch.bfloat16),
    Case(3, 4, 64, 16, 4, 4, kind="ties", dtype=torch.float16, hidden_size=5),
    Case(2, 4, 65, 8, 4, 4, kind="equal"),
    Case(1, 3, 7, 3, 7, 21),
    Case(1, 1, 1, 64, 1, 1),
    Case(2, 8, 1000, 64, 8, 0, first_row=17),
    Case(2, 8, 100, 7, 8, 20, num_words=2, first_row=50, hidden_size=64, dtype=torch.bfloat16),
    Case(1, 10, 100, 1, 10, 10, num_words=4, first_row=246),
    Case(1, 20, 300, 16, 33, 40, num_words=2, hidden_size=3),
    Case(1, 2, 90, 9, 64, 64, num_words=2, kind="ties"),
    Case(2, 10, 100, 32, 10, 10, mapped=True),
    Case(2, 3, 100, 32, 8, 9, static=True, mapped=True, kind="ties"),
    Case(1, 2, 20000, 64, 10, 10, kind="wide"),
    Case(1, 2, 4000, 1, 5, 10),
    Case(1, 3, 40, 16, 6, 9, kind="special"),
    Case(1, 2, 20, 64, 30, 30),
]


def make_inputs(case: Case) -> dict[str, object]:
    """Arguments of expand_topk; the pool has room before and behind the candidates, filled with poison."""
    shape = (case.batch, case.frontier_size)
    logits = torch.randn(*shape, case.vocab_size) * 3
    scores = -torch.rand(shape) * 4
    if case.kind == "ties":
        logits, scores = logits.round(), scores.round()
    if case.kind == "equal":
        logits, scores = torch.full_like(logits, 2.5), torch.zeros(shape)
    if case.kind == "wide":
        logits = logits * 30
    if case.kind == "special":
        values = torch.tensor([0.0, -0.0, 1.0, -2.5, 3e38, -3e38, -math.inf, math.nan])
        logits = values[torch.randint(len(values), logits.shape)]
        logits[:, 1] = logits[:, 1].masked_fill(torch.rand_like(logits[:, 1]) < 0.2, math.inf)
        logits[:, 2] = -math.inf
        scores = torch.tensor([-1.0, math.nan, -math.inf])[torch.randint(3, shape)]
    candidates = case.frontier_size * case.top_k
    pool_size = POOL_OFFSET + candidates + 3
    arguments = {
        "head": make_head(logits, case.tile_size, case.top_k),
        "frontier_scores": scores,
        "frontier_pool_index": torch.randint(-1, POOL_OFFSET, shape, dtype=torch.int32),
        "features": torch.randn(*shape, case.hidden_size).to(case.dtype),
        "frontier_mask": torch.randint(-(2**63), 2**63 - 1, (*shape, case.num_words)),
        "pool": DraftPool(
            tokens=torch.full((case.batch, pool_size), -9),
            scores=torch.full((case.batch, pool_size), float("nan")),
            parents=torch.full((case.batch, pool_size), -9, dtype=torch.int32),
        ),
        "pool_offset": POOL_OFFSET,
        "top_k": case.top_k,
        "first_row": case.first_row,
        "next_size": case.next_size,
    }
    if case.mapped:
        arguments["draft_to_target"] = torch.randperm(10 * case.vocab_size)[: case.vocab_size]
    if case.static:
        arguments["choices"] = torch.randperm(candidates)[: case.next_size].int()
    else:
        arguments |= {"seq_lens": torch.randint(0, 2**31 - 9, (case.batch,), dtype=torch.int32), "depth": 3, "position_ids": torch.full((case.batch, case.next_size), -9)}
    return arguments


def clone_arguments(arguments: dict[str, object]) -> dict[str, object]:
    copies = {"position_ids": arguments["position_ids"].clone()} if "position_ids" in arguments else {}
    return arguments | copies | {"pool": DraftPool(*(tensor.clone() for tensor in arguments["pool"]))}


def written(arguments: dict[str, object]) -> list[torch.Tensor]:
    """What expand_topk modifies."""
    return [*arguments["pool"], *([arguments["position_ids"]] if "position_ids" in arguments else [])]


def check(arguments: dict[str, object]) -> None:
    expected_arguments = clone_arguments(arguments)
    expected = reference.expand_topk(**expected_arguments)
    result = expand_topk(**arguments)
    for tensor, other in zip((*result, *written(arguments)), (*expected, *written(expected_arguments)), strict=True):
        assert_exact(tensor, other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: Case) -> None:
    check(make_inputs(case))


special_values = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, 3e38, -3e38, math.inf, -math.inf, math.nan])


@given(
    rows=st.lists(st.lists(special_values, min_size=9, max_size=9), min_size=3, max_size=3),
    scores=st.lists(st.sampled_from([0.0, -1.0, -1.0, math.inf, -math.inf, math.nan]), min_size=3, max_size=3),
    tile_size=st.integers(1, 10),
    top_k=st.integers(1, 9),
)
def test_special_values(rows: list[list[float]], scores: list[float], tile_size: int, top_k: int) -> None:
    arguments = make_inputs(Case(1, 3, 9, tile_size, top_k, 5 if top_k > 1 else 3))
    arguments["head"] = make_head(torch.tensor([rows]), tile_size, top_k)
    arguments["frontier_scores"] = torch.tensor([scores])
    check(arguments)


@pytest.mark.parametrize("tile_size", [1, 16, 64, 1000])
def test_is_expand_of_the_logits(tile_size: int) -> None:
    """The same children as expand; scores as close as two orders of summation are."""
    logits = torch.randn(2, 5, 700) * 4
    arguments = make_inputs(Case(2, 5, 700, tile_size, 6, 8))
    arguments["head"] = make_head(logits, tile_size, 6)
    other = {name: value for name, value in clone_arguments(arguments).items() if name not in ("head", "seq_lens", "depth", "position_ids")}
    result, expected = expand_topk(**arguments), expand(logits, **other)
    assert_exact(arguments["pool"].tokens, other["pool"].tokens)
    assert_exact(arguments["pool"].parents, other["pool"].parents)
    torch.testing.assert_close(arguments["pool"].scores, other["pool"].scores, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert_exact(result.pool_index, expected.pool_index)
    assert_exact(result.mask, expected.mask)


def test_scores_against_float64() -> None:
    logits = torch.randn(1, 4, 5000) * 3
    arguments = make_inputs(Case(1, 4, 5000, 64, 10, 10))
    arguments["head"] = make_head(logits, 64, 10)
    expand_topk(**arguments)
    scores = arguments["pool"].scores[0, POOL_OFFSET : POOL_OFFSET + 40].view(4, 10)
    exact = logits.double().log_softmax(-1)[0].topk(10).values + arguments["frontier_scores"][0, :, None].double()
    own = logits.log_softmax(-1)[0].topk(10).values + arguments["frontier_scores"][0, :, None]
    floor = 2.0**-23 * 16  # one unit in the last place of the log-sum-exp and of a score
    assert (scores - exact).abs().max() <= 2 * (own - exact).abs().max() + floor


def test_scores_never_rise_above_the_parent() -> None:
    logits = torch.randn(4, 8, 300)
    logits[..., 7] += 200
    arguments = make_inputs(Case(4, 8, 300, 32, 3, 3))
    arguments["head"] = make_head(logits, 32, 3)
    expand_topk(**arguments)
    scores = arguments["pool"].scores[:, POOL_OFFSET : POOL_OFFSET + 24].unflatten(1, (8, 3))
    assert (scores <= arguments["frontier_scores"][..., None]).all()
    assert_exact(scores[..., 0], arguments["frontier_scores"])


def rows_alone(arguments: dict[str, object], run: Callable[..., object]) -> None:
    """Each frontier node with its sequence's others and by itself: the same children, bit for bit."""
    together = clone_arguments(arguments)
    run(**together)
    batch, frontier_size, _, top_k = arguments["head"].keys.shape
    for b in range(batch):
        for f in range(frontier_size):
            alone = clone_arguments(arguments) | {
                name: arguments[name][b : b + 1, f : f + 1].contiguous() for name in ("frontier_scores", "frontier_pool_index", "features", "frontier_mask")
            }
            alone |= {"head": HeadTopK(*(tensor[b : b + 1, f : f + 1].contiguous() for tensor in arguments["head"])), "next_size": top_k}
            alone["pool"] = DraftPool(*(tensor[b : b + 1].contiguous() for tensor in alone["pool"]))
            alone |= {"seq_lens": arguments["seq_lens"][b : b + 1], "position_ids": torch.empty(1, top_k, dtype=torch.int64)}
            run(**alone)
            slots, own = slice(POOL_OFFSET + f * top_k, POOL_OFFSET + (f + 1) * top_k), slice(POOL_OFFSET, POOL_OFFSET + top_k)
            for tensor, other in zip(together["pool"], alone["pool"]):
                assert_exact(other[0, own], tensor[b, slots])


def test_rows_do_not_depend_on_each_other() -> None:
    rows_alone(make_inputs(Case(3, 10, 3000, 8, 6, 10)), expand_topk)


def test_ids_outside_the_map_and_padding_give_no_token() -> None:
    arguments = make_inputs(Case(1, 1, 6, 4, 8, 8))
    arguments["head"] = make_head(torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]]), 4, 8)
    arguments["draft_to_target"] = torch.tensor([10, 11, 12, 13])
    check(clone_arguments(arguments))
    assert expand_topk(**arguments).tokens.tolist() == [[10, 11, 12, 13, -1, -1, -1, -1]]
    assert arguments["pool"].scores[0, POOL_OFFSET + 6 : POOL_OFFSET + 8].tolist() == [-math.inf] * 2


def test_strided_features() -> None:
    arguments = make_inputs(Case(2, 4, 50, 16, 4, 6, dtype=torch.bfloat16))
    other = clone_arguments(arguments) | {"features": strided_copy(arguments["features"])}
    for tensor, expected in zip(expand_topk(**other), expand_topk(**arguments)):
        assert_exact(tensor, expected)


def test_empty_batch() -> None:
    result = expand_topk(**make_inputs(Case(0, 4, 50, 16, 4, 6)))
    assert result.tokens.shape == (0, 6) and result.mask.shape == (0, 6, 1) and result.features.shape == (0, 6, 8)


def test_bad_input_is_named() -> None:
    arguments = make_inputs(Case(2, 4, 50, 16, 4, 6, mapped=True, static=True))
    names = ["frontier_scores", "frontier_pool_index", "features", "frontier_mask", "draft_to_target", "choices"]
    assert_bad_tensors_refused(expand_topk, arguments, names, any_dtype=["features"])
    assert_refused("features", lambda: expand_topk(**(arguments | {"features": arguments["features"].double()})))
    head = arguments["head"]
    for field in HeadTopK._fields:
        tensor = getattr(head, field)
        for bad in (tensor.int(), tensor[:1], tensor[:, :3], tensor[:, :, :2], tensor.to("meta")):
            with pytest.raises(ValueError, match=r"^\w+: expected .*got "):
                expand_topk(**(arguments | {"head": head._replace(**{field: bad})}))
    pool = arguments["pool"]
    for field in DraftPool._fields:
        tensor = getattr(pool, field)
        for bad in (tensor.double(), tensor[:1], tensor[:, :-1].contiguous()[:, :20], tensor.to("meta")):
            with pytest.raises(ValueError, match=rf"pool\.\w+: expected"):
                expand_topk(**(arguments | {"pool": pool._replace(**{field: bad})}))
    for choices in ([0, 1, 2, 3, 4, 16], [-1, 0, 1, 2, 3, 4]):
        assert_refused("choices", lambda: expand_topk(**(arguments | {"choices": torch.tensor(choices, dtype=torch.int32)})))
    for name, value in [("top_k", 0), ("top_k", 3), ("top_k", 65), ("pool_offset", -1), ("pool_offset", 17), ("next_size", 17), ("first_row", 60)]:
        with pytest.raises(ValueError, match=r"expected"):
            expand_topk(**({key: item for key, item in arguments.items() if key != "choices"} | {name: value}))
    for shape in ((1, 1, 4097, 1), (1, 65, 1, 1)):
        big = make_inputs(Case(1, shape[1], 4, 4, 1, 1))
        big["head"] = HeadTopK(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[:3]), torch.zeros(shape[:3]))
        assert_refused("keys", lambda: expand_topk(**big))
