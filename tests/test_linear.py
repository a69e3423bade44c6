"""linear, embedding, expert_linear and route_experts against their references."""

import pytest
import torch
from eagle_kernels import (
    embedding,
    expert_linear,
    linear,
    pack_weight,
    reference,
    route_experts,
    slice_outputs,
    unpack_weight,
)
from helpers import assert_bad_tensors_refused, assert_close_fp32, assert_exact, assert_refused, strided_copy

DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
SHAPES = [(1, 1), (16, 16), (17, 3), (5, 100), (31, 65), (48, 576), (100, 1536), (333, 1001)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


@dtypes
@shapes
def test_pack_and_unpack(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = pack_weight(weight)
    assert (packed.out_features, packed.in_features) == shape
    assert_exact(unpack_weight(packed), weight)


@dtypes
@pytest.mark.parametrize("layout", ["panels", "rows"])
def test_a_slice_gives_the_outputs_of_the_whole(layout: str, dtype: torch.dtype, isa: str) -> None:
    weight = torch.randn(75, 33).to(dtype if layout == "panels" else torch.bfloat16)
    packed = pack_weight(weight, layout)
    for start in (0, 5, 16, 64, 74):
        part = slice_outputs(packed, start)
        shares = part.data.untyped_storage().data_ptr() == packed.data.untyped_storage().data_ptr()
        assert shares == (layout == "rows" or start % 16 == 0)
        assert_exact(unpack_weight(part), weight[start:])
        if layout == "panels":
            x = torch.randn(5, 33)
            assert_exact(linear(x, part), linear(x, packed)[:, start:])
    for start in (-16, 75, 80):
        with pytest.raises(ValueError, match=f"start: expected 0 to 74, got {start}"):
            slice_outputs(packed, start)


@dtypes
@shapes
def test_matches_reference(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    """One number of rows is enough: test_row_invariance.py shows that the others give the same bits."""
    x, bias = torch.randn(77, shape[1]), torch.randn(shape[0])
    packed = pack_weight(torch.randn(shape).to(dtype))
    for chosen_bias in (None, bias):
        oracle = reference.linear(x.double(), packed, None if chosen_bias is None else bias.double())
        assert_close_fp32(linear(x, packed, chosen_bias), oracle, reference.linear(x, packed, chosen_bias))


@dtypes
def test_strided_out_and_empty(dtype: torch.dtype, isa: str) -> None:
    x, packed = torch.randn(2, 5, 70), pack_weight(torch.randn(37, 70).to(dtype))
    expected = linear(x, packed)
    assert expected.shape == (2, 5, 37)
    assert_exact(linear(strided_copy(x), packed), expected)
    out = torch.full((2, 5, 37), float("nan"))
    assert linear(x, packed, out=out) is out
    assert_exact(out, expected)
    assert linear(x[:0], packed).shape == (0, 5, 37)
    assert linear(x[0, 0], packed).shape == (37,)


@dtypes
def test_nan_stays_in_its_row_and_column(dtype: torch.dtype, isa: str) -> None:
    x, weight = torch.randn(9, 70), torch.randn(37, 70).to(dtype)
    expected = linear(x, pack_weight(weight))
    x[4, 11], weight[20, 69] = float("nan"), float("inf")
    y = linear(x, pack_weight(weight))
    assert y[4].isnan().all() and not y[:, 20].isfinite().any()
    y[4], y[:, 20] = expected[4], expected[:, 20]
    assert_exact(y, expected)


@dtypes
def test_embedding(dtype: torch.dtype, isa: str) -> None:
    weight = torch.randn(37, 71).to(dtype)
    packed = pack_weight(weight)
    ids = torch.tensor([[0, 36, 5], [16, 15, -1]])
    y = embedding(ids, packed)
    assert_exact(y, weight.float()[ids.clamp(min=0)])
    assert_exact(y, reference.embedding(ids, packed))
    assert embedding(ids[:0], packed).shape == (0, 3, 71)


@dtypes
def test_expert_linear(dtype: torch.dtype, isa: str) -> None:
    weights = torch.randn(5, 37, 70).to(dtype)
    packed = pack_weight(weights)
    x, expert_ids = torch.randn(23, 70), torch.randint(0, 5, (23,), dtype=torch.int32)
    y = expert_linear(x, packed, expert_ids)
    oracle = reference.expert_linear(x.double(), packed, expert_ids)
    assert_close_fp32(y, oracle, reference.expert_linear(x, packed, expert_ids))
    for row in range(23):
        assert_exact(y[row], linear(x[row], pack_weight(weights[expert_ids[row]])))
    assert expert_linear(x[:0], packed, expert_ids[:0]).shape == (0, 37)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_experts, top_k", [(8, 2), (1, 1), (60, 4), (5, 5)])
def test_route_experts(num_experts: int, top_k: int, normalize: bool, isa: str) -> None:
    logits = torch.randn(33, num_experts)
    weights, expert_ids = route_experts(logits, top_k, normalize)
    oracle, oracle_ids = reference.route_experts(logits.double(), top_k, normalize)
    plain, _ = reference.route_experts(logits, top_k, normalize)
    assert_exact(expert_ids, oracle_ids)
    assert_close_fp32(weights, oracle, plain)


def test_route_experts_ties_and_empty(isa: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-0.0, 0.0, 5.0, 5.0]])
    weights, expert_ids = route_experts(logits, 3)
    assert_exact(expert_ids, torch.tensor([[1, 2, 0], [0, 1, 2], [2, 3, 0]], dtype=torch.int32))
    assert weights.sum(-1).allclose(torch.ones(3))
    weights, expert_ids = route_experts(logits[:0], 3)
    assert weights.shape == expert_ids.shape == (0, 3)


def test_bad_input_is_named() -> None:
    packed = pack_weight(torch.randn(37, 70))
    arguments = {"x": torch.randn(4, 70), "bias": torch.randn(37), "out": torch.empty(4, 37)}
    call = lambda **tensors: linear(weight=packed, **tensors)  # noqa: E731
    assert_bad_tensors_refused(call, arguments, list(arguments), any_shape=["x", "out"], first="x")
    for name, shape in [("x", [4, 71]), ("bias", [36]), ("out", [4, 36]), ("out", [3, 37])]:
        assert_refused(name, lambda: call(**(arguments | {name: torch.randn(shape)})))
    with pytest.raises(ValueError, match="^weight: expected"):
        pack_weight(torch.randn(37, 70, dtype=torch.float64))
    with pytest.raises(ValueError, match="^weight: expected"):
        pack_weight(torch.randn(37))
    with pytest.raises(ValueError, match="^ids: expected"):
        embedding(torch.zeros(3), packed)
    experts = pack_weight(torch.randn(2, 37, 70))
    expert_arguments = {"x": torch.randn(4, 70), "expert_ids": torch.zeros(4, dtype=torch.int32)}
    for name, tensor in [
        ("x", torch.randn(4, 71)),
        ("expert_ids", torch.zeros(3, dtype=torch.int32)),
        ("expert_ids", torch.zeros(4)),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            expert_linear(weights=experts, **(expert_arguments | {name: tensor}))
    with pytest.raises(ValueError, match="^router_logits: expected"):
        route_experts(torch.randn(4, 8, dtype=torch.float64), 2)
