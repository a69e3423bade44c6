"""What the engine does on CUDA alone, as far as it shows without one: long prompts through flash-attn (a stand-in of its interface that computes with PyTorch), devices, dtypes, limits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eagle_engine import EagleConfig, EagleError, SamplingParams, cuda_limits, prefill_attention
from eagle_engine.config import MAX_NODES, MAX_TOP_K
from eagle_engine.cuda_limits import check_limits
from eagle_engine.loading import engine_device, weights_dtype
from eagle_engine.target import TargetModel
from eagle_kernels import pack_weight, tree_attention, unpack_weight
from helpers import assert_exact, assert_refused, make_paged_cache
from tiny_engines import make_engine, random_drafter, random_eagle3, tiny_target
from tiny_targets import random_tokens


def flash_attn_func(q, k, v, softmax_scale, causal, window_size):
    """As flash-attn documents it: [B, Lq, Hq, D] and [B, Lk, Hkv, D]; causal aligned at the end; window_size = (left, right), -1 for none."""
    assert causal and window_size[1] in (0, -1)
    lq, lk = q.shape[1], k.shape[1]
    distance = torch.arange(lk - lq, lk)[:, None] - torch.arange(lk)[None]
    visible = distance >= 0
    if window_size[0] >= 0:
        visible &= distance <= window_size[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Lengths (queries, keys) of each call."""
    calls: list[tuple[int, int]] = []

    def counted(q, k, v, **options):
        calls.append((q.shape[1], k.shape[1]))
        return flash_attn_func(q, k, v, **options)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=counted))
    return calls


@pytest.mark.parametrize("window", [0, 1, 30])
@pytest.mark.parametrize("seq_len", [0, 77])
def test_equals_tree_attention(flash_attn: list, seq_len: int, window: int) -> None:
    cache = make_paged_cache([seq_len], 100, 16, 2, 16)
    q = torch.randn(1, 100, 6, 16)
    expected = tree_attention(q, *cache, window=window)
    out = prefill_attention.prefill_attention(q, cache.kv, cache.page_table, seq_len, window=window, out=torch.full_like(q, float("nan")))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert flash_attn == [(100, seq_len + 100)]


@pytest.fixture(params=["llama", "mistral-window"])
def target(request: pytest.FixtureRequest) -> TargetModel:
    """Made before the stand-in is in place: transformers, which makes the weights, would look into it."""
    return tiny_target(request.param, max_positions=1100)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_a_long_prompt_goes_through_flash_attn_in_large_pieces(target: TargetModel, kind: str, flash_attn: list) -> None:
    prompt, params = random_tokens(3, 700), SamplingParams(temperature=0.0, max_tokens=6)
    expected = make_engine(target, None, max_model_len=800).generate([prompt], params)[0].token_ids
    assert not flash_attn
    listed = dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2], eagle_aux_hidden_state_layer_id_convention="input")
    drafter = random_eagle3(target, **listed) if kind == "eagle-3" else random_drafter(target)
    engine = make_engine(target, drafter, max_model_len=800)
    engine.scheduler.chunk = 400
    assert engine.generate([prompt], params)[0].token_ids == expected
    # Both pieces, two layers of the target; the drafter's layer has nothing to attend for, since nothing is drafted inside a prompt.
    assert flash_attn == [(400, 400)] * 2 + [(300, 700)] * 2


def test_it_is_used_where_it_is_installed_and_bits_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(prefill_attention, "has_flash_attn", lambda: True)
    assert prefill_attention.longest_chunk(cuda, False, 256) == prefill_attention.LONG_CHUNK
    assert prefill_attention.longest_chunk(cuda, True, 256) == 256
    assert prefill_attention.longest_chunk(cpu, False, 100) == 100
    monkeypatch.setattr(prefill_attention, "has_flash_attn", lambda: False)
    assert prefill_attention.longest_chunk(cuda, False, 256) == 256


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine_device("auto") == engine_device("cpu") == cpu
    with pytest.raises(EagleError, match="device cuda was asked for, but"):
        engine_device("cuda")
    with pytest.raises(EagleError, match="device: expected one of auto, cpu, cuda, got 'tpu'"):
        engine_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_device("auto") == engine_device("cuda") == cuda and engine_device("cpu") == cpu
    assert weights_dtype("auto", "float32", False, cpu) == torch.float32 and weights_dtype("auto", "float32", False, cuda) == torch.bfloat16
    assert weights_dtype("auto", "float16", False, cuda) == torch.float16 and weights_dtype("auto", "float16", True, cuda) == torch.bfloat16


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7)], ids=str)
def test_rows_layout(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).bfloat16()
    packed = pack_weight(weight, "rows")
    assert (packed.out_features, packed.in_features, packed.layout) == (5, 7, "rows")
    assert_exact(packed.data, weight)
    assert_exact(unpack_weight(packed), weight)
    assert_refused("weight", lambda: pack_weight(weight.float(), "rows"))


def test_cuda_limits_are_told_before_anything_is_allocated() -> None:
    check_limits(EagleConfig(top_k=10, max_depth=6, num_nodes=60, page_size=64), {"target": 128, "drafter": 128}, 128256)
    check_limits(EagleConfig(tree="chain", max_depth=64, page_size=1), {"target": 64}, 0)
    for message, options, head_dims, vocab in (
        ("page_size must be a power of two on CUDA, got 24", dict(page_size=24), {"target": 64}, 0),
        ("the drafter has a head_dim of 32; on CUDA it must be one of 64, 80", {}, {"target": 64, "drafter": 32}, 100),
        ("a draft vocabulary of 300000 is more than the 262144", {}, {"target": 64}, 300_000),
    ):
        with pytest.raises(EagleError, match=re.escape(message)):
            check_limits(EagleConfig(**options), head_dims, vocab)


def test_limits_are_those_of_the_kernels() -> None:
    from eagle_kernels.head_topk import HEAD_TILE
    from eagle_kernels.triton import tree_attention as kernels

    assert cuda_limits.HEAD_DIMS == kernels.HEAD_DIMS
    root = Path(__file__).parent.parent / "csrc"
    # The largest pool that EagleConfig allows: (max_depth - 1) * top_k is at most MAX_NODES.
    pool = int(re.search(r"kMaxRerankPool = (\d+)", (root / "cuda" / "rerank.h").read_text())[1])
    assert MAX_TOP_K + MAX_NODES * MAX_TOP_K <= pool
    tiles = int(re.search(r"kMaxTiles = (\d+)", (root / "cpu" / "expand_topk.h").read_text())[1])
    assert cuda_limits.MAX_DRAFT_VOCAB == HEAD_TILE * tiles


def test_a_level_that_is_too_wide_is_refused_on_creation() -> None:
    wide = [(i,) for i in range(9)] + [(i, j) for i in range(9) for j in range(8)] + [(i, j, 0) for i in range(9) for j in range(8)]
    with pytest.raises(EagleError, match="choices: a level has at most 64 nodes with children, depth 2 has 72"):
        EagleConfig(tree="static", choices=tuple(wide))
