"""head_topk and logits_topk: keys exactly, statistics closely."""

import pytest
import torch
from eagle_kernels import HeadTopK, head_topk, linear, logits_topk, pack_weight, record, reference
from eagle_kernels.reference.head_topk import topk_key
from helpers import assert_bad_tensors_refused, assert_close_fp32, assert_exact, assert_refused, strided_copy
from hypothesis import given
from hypothesis import strategies as st

special_values = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, 3e38, -3e38, 1e-40, float("inf"), -float("inf"), float("nan")])


def assert_matches(result: HeadTopK, logits: torch.Tensor, top_k: int, tile: int | None = None) -> None:
    """Of the kernel that wrote `result` for these logits."""
    expected = reference.logits_topk(logits, top_k, tile=tile)
    assert_exact(result.keys, expected.keys)
    assert_exact(result.max + 0.0, expected.max + 0.0)  # of equal zeros any may be the greatest
    regular = expected.max.isfinite()
    assert_exact(result.sum_exp[~regular], expected.sum_exp[~regular])
    # What they are for is the log-sum-exp: that must be as good as PyTorch's.
    log_sum = (result.max.double() + result.sum_exp.double().log()).float()
    width = tile or logits.shape[-1]
    clean = torch.nn.functional.pad(logits.nan_to_num(-torch.inf, torch.inf, -torch.inf), (0, -logits.shape[-1] % width), value=-torch.inf).unflatten(-1, (-1, width))
    assert_close_fp32(log_sum[regular], clean.double().logsumexp(-1)[regular], clean.logsumexp(-1)[regular])


def make_logits(rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size) * 3
    if kind == "ties":
        logits = logits.round() * torch.where(torch.rand(rows, vocab_size) < 0.5, 1.0, -1.0)
    return torch.full_like(logits, 1.25) if kind == "equal" else logits


@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
@pytest.mark.parametrize("vocab_size, top_k", [(1, 1), (7, 7), (64, 64), (65, 10), (1001, 10), (5000, 64)])
def test_logits_topk(vocab_size: int, top_k: int, kind: str, isa: str) -> None:
    logits = make_logits(5, vocab_size, kind)
    assert_matches(logits_topk(strided_copy(logits), top_k), logits, top_k)


@given(rows=st.lists(st.lists(special_values, min_size=19, max_size=19), min_size=1, max_size=4), top_k=st.integers(1, 19))
def test_special_values(isa: str, rows: list[list[float]], top_k: int) -> None:
    logits = torch.tensor(rows)
    assert_matches(logits_topk(logits, top_k), logits, top_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows, vocab_size, hidden_size, top_k", [(1, 1, 3, 1), (10, 501, 64, 10), (3, 100, 65, 64)])
def test_head_topk_has_the_bits_of_linear(rows: int, vocab_size: int, hidden_size: int, top_k: int, dtype: torch.dtype, isa: str) -> None:
    features, head = strided_copy(torch.randn(rows, hidden_size)), pack_weight(torch.randn(vocab_size, hidden_size).to(dtype))
    result = head_topk(features, head, top_k)
    for tensor, expected in zip(result, logits_topk(linear(features, head), top_k)):
        assert_exact(tensor, expected)
    loose = reference.head_topk(features.double(), head, top_k)
    torch.testing.assert_close(result.max, loose.max, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.sum_exp, loose.sum_exp, rtol=1e-4, atol=1e-4)


def test_keys_order_logits_and_ids() -> None:
    pairs = [(float("inf"), 5), (3.5, 0), (3.5, 1), (1e-40, 9), (-0.0, 1), (0.0, 2), (-0.0, 2**31 - 2), (-1e-40, 0), (-3e38, 7), (-float("inf"), 0), (-float("inf"), 4)]
    keys = [topk_key(*pair) for pair in pairs]
    assert keys == sorted(keys, reverse=True) and len(set(keys)) == len(keys) and min(keys) > -(2**63)


def test_shapes_out_recording_and_empty(isa: str) -> None:
    features, head = torch.randn(2, 3, 20), pack_weight(torch.randn(37, 20))
    result = head_topk(features, head, 4)
    assert [list(tensor.shape) for tensor in result] == [[2, 3, 1, 4], [2, 3, 1], [2, 3, 1]]
    out = HeadTopK(*(torch.zeros_like(tensor) for tensor in result))
    with record() as recording:
        head_topk(features, head, 4, out=out)
    for tensor in out:
        tensor.zero_()
    features.neg_()
    recording.replay()
    for tensor, expected in zip(out, head_topk(features, head, 4)):
        assert_exact(tensor, expected)
    assert head_topk(features[:0], head, 4).keys.shape == (0, 3, 1, 4)
    assert logits_topk(torch.empty(0, 9), 4).keys.shape == (0, 1, 4)


def test_bad_input_is_named() -> None:
    features, head, logits = torch.randn(4, 20), pack_weight(torch.randn(37, 20)), torch.randn(4, 37)
    out = head_topk(features, head, 5)
    call = lambda features=features, weight=head.data, **tensors: head_topk(features, head._replace(data=weight), 5, out=out._replace(**tensors))  # noqa: E731
    arguments = {"features": features, "weight": head.data} | out._asdict()
    assert_bad_tensors_refused(call, arguments, list(arguments), any_dtype=["weight"], any_shape=["features", *out._fields], first="features")
    for name, bad in [("features", torch.randn(4, 21)), ("keys", out.keys[:3]), ("max", out.max[:3]), ("sum_exp", out.sum_exp.expand(4, 2).contiguous())]:
        assert_refused(name, lambda: call(**{name: bad}))
    assert_refused("logits", lambda: logits_topk(logits.double(), 5))
    for top_k in (0, 38, 65):
        assert_refused("top_k", lambda: head_topk(features, head, top_k))
        assert_refused("top_k", lambda: logits_topk(logits, top_k))
