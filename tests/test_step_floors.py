"""Floors of a step, counted by hand, and the rates of the machine that they are made of."""

import pytest
import torch
from eagle_engine import EagleConfig, machine_rates
from eagle_engine.cli import profile
from eagle_engine.machine_rates import Ceilings, measure_ceilings
from eagle_engine.step_floors import Forward, draft_forwards, floor_seconds, target_weights, verify_forwards
from eagle_engine.tree_shape import PLAIN, tree_shape
from test_cli_profile import RATES
from tiny_engines import random_drafter, random_eagle3, tiny_target


def test_floor_of_a_verify_forward_counted_by_hand():
    """hidden 48, 4 query and 2 KV heads, float32; untied head."""
    target = tiny_target("llama")
    c = target.config
    assert (c.hidden_size, c.num_heads, c.num_kv_heads, c.tie_word_embeddings) == (48, 4, 2, False)
    layer = c.head_dim * 48 * (4 + 2 + 2) + 4 * c.head_dim * 48 + 3 * c.intermediate_size * 48
    weights = c.num_layers * layer + c.vocab_size * 48
    assert target_weights(c) == weights
    (forward,) = verify_forwards(target, tree_shape(EagleConfig(tree="dynamic", top_k=3, max_depth=2, num_nodes=5)), 3, 100.0)
    assert forward == Forward(4 * weights + 3 * 100 * c.num_layers * 2 * 2 * c.head_dim * 4, 2 * weights * 3 * 5)
    assert forward.seconds(Ceilings(1e9, 1.0, 1e30)) == forward.num_bytes / 1e9 and forward.seconds(Ceilings(1e30, 1.0, 1e9)) == forward.flops / 1e9


def test_floor_knows_windows_and_experts():
    window = tiny_target("mistral-window")
    size = window.config.sliding_window
    assert size > 0
    assert verify_forwards(window, PLAIN, 1, size + 50.0) == verify_forwards(window, PLAIN, 1, size) != verify_forwards(window, PLAIN, 1, size - 1.0)
    c = tiny_target("mixtral").config
    assert 1 < c.num_experts_per_token < c.num_experts
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    expert = 3 * c.hidden_size * c.intermediate_size
    assert target_weights(c) == c.num_layers * (attention + c.num_experts * c.hidden_size + c.num_experts_per_token * expert) + c.vocab_size * c.hidden_size


def test_floor_of_the_draft_counted_by_hand():
    """Two levels: a forward over the last row and a head, a forward over top_k rows and a head. EAGLE-3 fuses in the first forward alone."""
    shape = tree_shape(EagleConfig(tree="dynamic", top_k=3, max_depth=2, num_nodes=5))
    target = tiny_target("llama")
    drafter = random_drafter(target, intermediate_size=40)
    c = drafter.config.layer
    weights = 48 * (96 + 48 * 2 + 2 * c.num_kv_heads * c.head_dim + 3 * 40)
    cache, head = 2 * 10 * 2 * c.num_kv_heads * c.head_dim * 4, 48 * target.config.vocab_size
    assert draft_forwards(drafter, target, shape, 2, 10.0) == [
        Forward(4 * weights + cache, 2 * weights * 2), Forward(4 * head, 2 * head * 2), Forward(4 * weights + cache, 2 * weights * 6), Forward(4 * head, 2 * head * 6),
    ]  # fmt: skip
    deep = tiny_target("llama", num_hidden_layers=7)
    eagle3 = random_eagle3(deep)
    first, _, second, _ = draft_forwards(eagle3, deep, shape, 1, 0.0)
    assert first.num_bytes - second.num_bytes == 4 * 48 * 3 * 48
    assert floor_seconds([first, second], RATES) == first.seconds(RATES) + second.seconds(RATES)


def test_machine_rates_are_those_of_what_the_kernels_do(monkeypatch):
    asked = []
    monkeypatch.setattr(profile, "measure_ceilings", lambda *arguments, **options: asked.append((*arguments, *options.values())) or RATES)
    target = tiny_target("llama")
    assert profile.machine_rates(target) == (RATES, "float32") and asked == [("cpu", profile.SMALLEST_BUFFER, torch.float32)]
    half = tiny_target("llama", dtype=torch.bfloat16)
    for isa, dtype in (("amx", "bfloat16"), ("avx2", "float32")):
        monkeypatch.setattr(profile.eagle_kernels, "isa", lambda: isa)
        assert profile.machine_rates(half)[1] == dtype


def test_ceilings_are_rates():
    rates = measure_ceilings("cpu", 1, num_bytes=1 << 20)
    assert all(1e6 < rate < 1e16 for rate in rates)


@pytest.mark.parametrize("faster", ["gemm", "linear"])
def test_the_multiply_rate_is_the_best_that_is_reached(faster, monkeypatch):
    times = {"sum": 2.0, "max": 1.0, "dot": 4.0, "copy": 2.0, "gemm": 3.0, "linear": 3.0} | {faster: 0.5}

    def timed(calls, rounds, timer):
        for call in calls.values():
            call()
        return {name: times[name] for name in calls}

    monkeypatch.setattr(machine_rates, "median_seconds", timed)
    assert measure_ceilings("cpu", num_bytes=1 << 12) == Ceilings(4096.0, 4096.0, 2 * 1024**3 / 0.5)
    # Products in bf16 are timed for the matrix unit alone, which eagle_kernels uses for parts of floats.
    assert measure_ceilings("cpu", num_bytes=1 << 12, dtype=torch.bfloat16).fma_rate == 2 * 1024**3 / times["gemm"]
