"""Row invariance on a GPU: a row alone (M = 1) and the same row among 8, 16, 33, 60 and more have the same bits, in deterministic mode. The same tests on the CPU keep this file from rotting."""

import pytest
import torch
from eagle_kernels import head_topk, linear, logits_topk, pack_weight, rms_norm, sample, silu_mul, tree_attention
from helpers import assert_exact, make_paged_cache, packed_mask, random_tree

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# 65 and 130 fill more than one tile of 64 rows.
ROWS = (8, 16, 33, 60, 65, 130)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def activations(dtype: str, device: str) -> torch.dtype:
    """CUDA computes on the weights' dtype, the CPU on fp32."""
    return DTYPES[dtype] if device == "cuda" else torch.float32


def weight_of(out_features: int, in_features: int, dtype: str, device: str):
    """fp16 weights are CUDA's alone; the CPU takes fp32 then."""
    kind = torch.float32 if device == "cpu" and dtype == "fp16" else DTYPES[dtype]
    return pack_weight((torch.randn(out_features, in_features, device=device) / in_features**0.5).to(kind))


def assert_rows_alone_are_rows_together(op, x: torch.Tensor) -> None:
    """op: [M, ...] -> tensors whose first dimension is M. Also three runs give the same bits."""
    alone = [op(x[i : i + 1]) for i in range(x.shape[0])]
    for count in (rows for rows in ROWS if rows <= x.shape[0]):
        for start in {0, x.shape[0] - count}:
            together = op(x[start : start + count])
            for tensor, *others in zip(together, *(alone[i] for i in range(start, start + count))):
                assert_exact(tensor.cpu(), torch.cat(others).cpu())
    runs = [op(x) for _ in range(3)]
    for first, *others in zip(*runs):
        for other in others:
            assert_exact(other.cpu(), first.cpu())


# outputs, inputs: whole tiles; tails in both directions; Llama's qkv; SmolLM2's down
@devices
@dtypes
@pytest.mark.parametrize("out_features, in_features", [(128, 256), (77, 130), (6144, 4096), (576, 1536)])
def test_linear(out_features: int, in_features: int, dtype: str, device: str) -> None:
    if device == "cpu" and out_features > 1000:
        pytest.skip("a GPU's size")
    weight = weight_of(out_features, in_features, dtype, device)
    x = torch.randn(130, in_features, device=device).to(activations(dtype, device))
    bias = torch.randn(out_features, device=device).to(x.dtype)

    def op(x: torch.Tensor) -> list[torch.Tensor]:
        wide = torch.empty(x.shape[0], out_features, device=device)
        return [linear(x, weight, deterministic=True), linear(x, weight, bias, deterministic=True), linear(x, weight, deterministic=True, out=wide)]

    assert_rows_alone_are_rows_together(op, x)


@devices
@dtypes
@pytest.mark.parametrize("vocab_size, hidden_size, top_k", [(1000, 256, 10), (333, 100, 3), (32000, 4096, 10)])
def test_head_topk(vocab_size: int, hidden_size: int, top_k: int, dtype: str, device: str) -> None:
    if device == "cpu" and vocab_size > 1000:
        pytest.skip("a GPU's size")
    weight = weight_of(vocab_size, hidden_size, dtype, device)
    x = torch.randn(65, hidden_size, device=device).to(activations(dtype, device))
    assert_rows_alone_are_rows_together(lambda x: head_topk(x, weight, top_k), x)


@devices
@dtypes
def test_head_topk_has_the_logits_of_linear(dtype: str, device: str) -> None:
    weight = weight_of(1000, 512, dtype, device)
    x = torch.randn(33, 512, device=device).to(activations(dtype, device))
    logits = linear(x, weight, deterministic=True, out=torch.empty(33, 1000, device=device))
    best = head_topk(x, weight, 5).keys.flatten(1).topk(5).values
    assert_exact(best.cpu(), logits_topk(logits, 5).keys.flatten(1).topk(5).values.cpu())


@devices
@pytest.mark.parametrize("vocab_size", [1000, 49152])
@pytest.mark.parametrize("order", ["hf", "vllm"])
def test_sample(vocab_size: int, order: str, device: str) -> None:
    if device == "cpu" and vocab_size > 1000:
        pytest.skip("a GPU's size")
    rows = 60
    logits = 3 * torch.randn(rows, vocab_size, device=device)
    pick = lambda *values: torch.tensor([values[i % len(values)] for i in range(rows)], device=device)  # noqa: E731
    parameters = {"temperature": pick(0.0, 0.8, 1.0, 1.3), "top_k": pick(0, 50, 3).int(), "top_p": pick(1.0, 0.9, 0.95, 1.0, 0.5), "min_p": pick(0.0, 0.0, 0.05)}
    parameters |= {"seeds": torch.arange(rows, device=device) - 7, "positions": torch.arange(rows, device=device) * 1001}
    index = torch.arange(rows, device=device)

    def op(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits[chosen], **{name: values[chosen] for name, values in parameters.items()}, order=order, return_log_probs=True)

    assert_rows_alone_are_rows_together(op, index)


@devices
@dtypes
@pytest.mark.parametrize("size", [576, 4096])
def test_layer_ops(size: int, dtype: str, device: str) -> None:
    weight = torch.randn(size, device=device)
    x = torch.randn(65, size, device=device).to(activations(dtype, device))

    def op(x: torch.Tensor) -> list[torch.Tensor]:
        residual = x.flip(-1).contiguous()
        return [rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5, residual), residual, silu_mul(x)]

    assert_rows_alone_are_rows_together(op, x)


# head_dim, group, window: every family of tiles; 33 nodes of a group of 4 are three tiles of 64 rows
@devices
@pytest.mark.parametrize("num_nodes", [8, 16, 33, 60])
@pytest.mark.parametrize("head_dim, group, window, dtype", [(64, 3, 0, "bf16"), (80, 1, 0, "fp16"), (96, 1, 0, "bf16"), (128, 4, 0, "bf16"), (128, 4, 100, "bf16"), (256, 2, 0, "fp16")])
def test_tree_attention_of_a_chain(head_dim: int, group: int, window: int, num_nodes: int, dtype: str, device: str) -> None:
    """Each node of a chain has the bits of one-token decoding at its place."""
    if device == "cpu" and dtype == "fp16":
        pytest.skip("the CPU has no fp16")
    kv_heads, prefix = 2, 500  # nodes cross a boundary of splits at 512
    cache = make_paged_cache([prefix], num_nodes, 16, kv_heads, head_dim, dtype=DTYPES[dtype])
    kv, table, seq_lens = (tensor.to(device) for tensor in cache)
    q = torch.randn(1, num_nodes, kv_heads * group, head_dim, device=device).to(activations(dtype, device))
    mask = packed_mask(random_tree(1, num_nodes, "chain")).to(device)
    out, lse = tree_attention(q, kv, table, seq_lens, mask, window=window, deterministic=True, return_lse=True)
    for node in range(num_nodes):
        single, single_lse = tree_attention(q[:, node : node + 1], kv, table, seq_lens + node, None, window=window, deterministic=True, return_lse=True)
        assert_exact(single[0, 0].cpu(), out[0, node].cpu())
        assert_exact(single_lse[0, 0].cpu(), lse[0, node].cpu())


@devices
def test_the_comparison_can_fail(device: str) -> None:
    """A product whose bits depend on the number of rows is found."""
    x = torch.randn(60, 64, device=device)
    with pytest.raises(pytest.fail.Exception, match="differ"):
        assert_rows_alone_are_rows_together(lambda x: [x / x.shape[0]], x)
