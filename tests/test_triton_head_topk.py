"""The Triton kernels head_topk and logits_topk under the interpreter."""

import pytest
import torch
from eagle_kernels import HeadTopK
from eagle_kernels.head_topk import HEAD_TILE, LOGITS_TILE
from eagle_kernels.triton.head_topk import head_topk, logits_topk
from eagle_kernels.triton.linear import linear
from helpers import assert_bad_tensors_refused, assert_exact, assert_refused, strided_copy
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import half_dtypes
from test_head_topk import assert_matches, make_logits, special_values

pytestmark = pytest.mark.usefixtures("checked_launches")


def result_of(rows: int, vocab_size: int, tile: int, top_k: int) -> HeadTopK:
    """Poison where the result will be."""
    tiles = -(-vocab_size // tile)
    return HeadTopK(torch.full((rows, tiles, top_k), -7), torch.full((rows, tiles), float("nan")), torch.full((rows, tiles), float("nan")))


@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
@pytest.mark.parametrize("vocab_size, top_k", [(1, 1), (7, 7), (1024, 10), (1025, 3), (2500, 64)])
def test_logits_topk(vocab_size: int, top_k: int, kind: str) -> None:
    logits = make_logits(3, vocab_size, kind)
    result = result_of(3, vocab_size, LOGITS_TILE, top_k)
    logits_topk(strided_copy(logits), *result)
    assert_matches(result, logits, top_k, LOGITS_TILE)


@settings(max_examples=15)
@given(rows=st.lists(st.lists(special_values, min_size=19, max_size=19), min_size=1, max_size=4), top_k=st.integers(1, 19))
def test_special_values(rows: list[list[float]], top_k: int) -> None:
    logits = torch.tensor(rows)
    result = result_of(len(rows), 19, LOGITS_TILE, top_k)
    logits_topk(logits, *result)
    assert_matches(result, logits, top_k, LOGITS_TILE)


@pytest.mark.parametrize("rows, vocab_size, hidden_size, top_k", [(1, 1, 3, 1), (10, 129, 128, 10), (66, 70, 130, 5), (2, 64, 256, 64)])
@half_dtypes
def test_head_topk_has_the_bits_of_linear(dtype: torch.dtype, rows: int, vocab_size: int, hidden_size: int, top_k: int, fixed_order_dot: None) -> None:
    features, head = strided_copy(torch.randn(rows, hidden_size).to(dtype)), torch.randn(vocab_size, hidden_size).to(dtype)
    logits, result = torch.empty(rows, vocab_size), result_of(rows, vocab_size, HEAD_TILE, top_k)
    linear(features, head, None, vocab_size, logits)
    head_topk(features, head, vocab_size, *result)
    assert_matches(result, logits, top_k, HEAD_TILE)


def test_special_features(fixed_order_dot: None) -> None:
    """Rows of NaN and of infinities beside a regular one."""
    features, head = torch.randn(4, 5).bfloat16(), torch.randn(70, 5).bfloat16()
    features[1], features[2], features[3] = float("nan"), float("inf"), 0.0
    logits, result = torch.empty(4, 70), result_of(4, 70, HEAD_TILE, 6)
    linear(features, head, None, 70, logits)
    head_topk(features, head, 70, *result)
    assert_matches(result, logits, 6, HEAD_TILE)


def test_rows_do_not_depend_on_their_company(fixed_order_dot: None) -> None:
    features, head, logits = torch.randn(33, 100).bfloat16(), torch.randn(65, 100).bfloat16(), torch.randn(33, 70)
    together, of_logits = result_of(33, 65, HEAD_TILE, 4), result_of(33, 70, LOGITS_TILE, 4)
    head_topk(features, head, 65, *together)
    logits_topk(logits, *of_logits)
    for rows in (slice(0, 1), slice(7, 12), slice(32, 33)):
        count = rows.stop - rows.start
        some, some_of_logits = result_of(count, 65, HEAD_TILE, 4), result_of(count, 70, LOGITS_TILE, 4)
        head_topk(features[rows], head, 65, *some)
        logits_topk(logits[rows], *some_of_logits)
        for tensor, expected in zip((*some, *some_of_logits), (*together, *of_logits)):
            assert_exact(tensor, expected[rows])


def test_empty() -> None:
    head_topk(torch.empty(0, 8).half(), torch.empty(5, 8).half(), 5, *result_of(0, 5, HEAD_TILE, 2))
    logits_topk(torch.empty(0, 5), *result_of(0, 5, LOGITS_TILE, 2))


def test_bad_input_is_named() -> None:
    features, head, logits = torch.randn(4, 20).bfloat16(), torch.randn(70, 20).bfloat16(), torch.randn(4, 70)
    arguments = {"features": features, "weight": head} | result_of(4, 70, HEAD_TILE, 5)._asdict()
    call = lambda **tensors: head_topk(out_features=70, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_dtype=["features"], first="features")
    for name, bad in [("features", features.float()), ("weight", head[:69]), ("keys", arguments["keys"][:, :1].clone()), ("max", arguments["max"][:3]), ("sum_exp", arguments["sum_exp"][:3])]:
        assert_refused(name, lambda: call(**(arguments | {name: bad})))
    for top_k in (0, 65):
        assert_refused("top_k", lambda: call(**(arguments | {"keys": torch.empty(4, 2, top_k, dtype=torch.int64)})))
    arguments = {"logits": logits} | result_of(4, 70, LOGITS_TILE, 5)._asdict()
    assert_bad_tensors_refused(logits_topk, arguments, list(arguments), first="logits")
