"""Every instruction set gives the same bits, and one can be chosen."""

import os
import random
import subprocess
import sys

import eagle_kernels
import pytest
import torch
from eagle_kernels import (
    DraftPool,
    embedding,
    expand,
    expert_linear,
    filter_probs,
    linear,
    pack_weight,
    rms_norm,
    rope_store_kv,
    route_experts,
    sample,
    silu_mul,
    tree_attention,
)
from helpers import assert_exact, make_paged_cache, packed_mask, random_tree
from test_rope_store_kv import make_rope_table
from test_row_invariance import OPTIONS
from test_sample import make_parameters, make_penalties


def every_op() -> list[tuple[str, torch.Tensor]]:
    """Outputs of each op with vector code, on the inputs that the current seed gives."""
    seq_lens, num_nodes = [0, 63, 130], 26
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        x, packed = torch.randn(19, 333), pack_weight(torch.randn(101, 333).to(dtype))
        outputs.append((f"linear {dtype}", linear(x, packed, torch.randn(101))))
        outputs.append((f"embedding {dtype}", embedding(torch.arange(101), packed)))
        experts, expert_ids = pack_weight(torch.randn(3, 40, 333).to(dtype)), torch.randint(0, 3, (19,), dtype=torch.int32)
        outputs.append((f"expert_linear {dtype}", expert_linear(x, experts, expert_ids)))
        for head_dim in (16, 80, 128):
            cache = make_paged_cache(seq_lens, num_nodes, 16, 2, head_dim, dtype=dtype)
            q, mask = torch.randn(3, num_nodes, 6, head_dim) * 3, packed_mask(random_tree(3, num_nodes))
            for options in OPTIONS:
                out, lse = tree_attention(q, *cache, mask, return_lse=True, **options)
                outputs += [(f"tree_attention {dtype} {head_dim} {options}", out), ("lse", lse)]
            k, v = torch.randn(3, num_nodes, 2, head_dim), torch.randn(3, num_nodes, 2, head_dim)
            rope_store_kv(q, k, v, torch.randint(0, 200, (3, num_nodes)), make_rope_table(200, head_dim), *cache)
            outputs += [("rope_store_kv q", q), ("rope_store_kv cache", cache.kv.nan_to_num(7.0))]
    x, weight, residual = torch.randn(9, 333) * 5, torch.randn(333), torch.randn(9, 333)
    outputs.append(("rms_norm", rms_norm(x, weight, 1e-6, residual)))
    gate_up = torch.cat((torch.linspace(-100, 100, 5000), torch.randn(5000))).view(2, -1).t().flatten()[None].contiguous()
    outputs.append(("silu_mul", silu_mul(gate_up)))
    weights, expert_ids = route_experts(torch.randn(50, 9), 3)
    outputs += [("route_experts", weights), ("route_experts", expert_ids)]
    logits, parameters = torch.randn(60, 777) * 4, make_parameters(60, 777)
    tokens, log_probs = sample(logits, **parameters, **make_penalties(60, 777), return_log_probs=True)
    outputs += [("sample", tokens), ("log_probs", log_probs)]
    outputs.append(("filter_probs", filter_probs(logits, *(parameters[name] for name in ("temperature", "top_k", "top_p", "min_p")))))
    pool = DraftPool(torch.zeros(6, 100, dtype=torch.int64), torch.zeros(6, 100), torch.zeros(6, 100, dtype=torch.int32))
    frontier = expand(logits.view(6, 10, 777), -torch.rand(6, 10), torch.zeros(6, 10, dtype=torch.int32), torch.randn(6, 10, 3), torch.zeros(6, 10, 1, dtype=torch.int64), pool, 0, 10, first_row=0, next_size=10)
    outputs += [("expand pool", pool.scores), ("expand", frontier.pool_index)]
    outputs.append(("gumbel_noise", eagle_kernels.gumbel_noise(torch.arange(30), torch.arange(30) * 5, 1000)))
    return outputs


# The matrix unit adds products with bf16 weights up in another order.
OTHER_BITS = {"amx": ("linear torch.bfloat16", "expert_linear torch.bfloat16")}


@pytest.mark.skipif(len(eagle_kernels.available_isas()) < 2, reason="this machine has one code path only")
@pytest.mark.parametrize("name", [name for name in eagle_kernels.available_isas() if name != "portable"])
def test_code_paths_give_the_same_bits(name: str) -> None:
    previous, seed, results = eagle_kernels.isa(), random.randrange(2**31), {}
    try:
        for path in ("portable", name):
            eagle_kernels.set_isa(path)
            assert eagle_kernels.isa() == path
            torch.manual_seed(seed)
            random.seed(seed)
            results[path] = every_op()
    finally:
        eagle_kernels.set_isa(previous)
    for (label, tensor), (_, expected) in zip(results[name], results["portable"], strict=True):
        if label in OTHER_BITS.get(name, ()):
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-3)
            continue
        try:
            assert_exact(tensor, expected)
        except pytest.fail.Exception as failure:
            raise AssertionError(f"{label}: {failure}") from failure


def test_a_code_path_can_be_chosen_from_outside() -> None:
    program = "import eagle_kernels; print(eagle_kernels.isa())"
    for name, expected in (("portable", "portable\n"), ("nonesuch", "")):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"EAGLE_ISA": name})
        assert result.stdout == expected
    assert "EAGLE_ISA: isa: expected one of those of available_isas(), got 'nonesuch'; this processor has portable" in result.stderr


def test_an_unknown_code_path_is_refused() -> None:
    with pytest.raises(ValueError, match="nonesuch"):
        eagle_kernels.set_isa("nonesuch")
