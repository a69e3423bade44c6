"""The engine as it runs on a GPU, without one: bf16 activations, weights as rows, and the Triton kernels, interpreted, behind the ops. The CUDA C++ kernels are stood in for by their CPU twins, whose
equality tests/test_cuda_kernels.py shows."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import eagle_kernels._cuda as cuda
import pytest
import torch
from eagle_engine import EagleConfig, Engine, SamplingParams
from eagle_engine.step import PhaseTimer, run_step
from eagle_kernels import HeadTopK
from helpers import assert_exact
from tiny_engines import begin_requests, bigram_drafter, random_drafter, random_eagle3, rows_weights, tiny_target
from tiny_targets import random_tokens

from eagle_engine.target import TargetModel
from eagle_kernels._extension import OPS

PUBLIC = ("advance", "accept", "compact", "expand", "gumbel_noise", "head_topk", "linear", "rerank", "rms_norm", "rope_store_kv", "sample", "silu_mul", "tree_attention")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Ops with a Triton kernel go to it, all others where they went. Counts the calls of the former."""
    calls: Counter[str] = Counter()

    def counted(name: str, launcher):
        def call(*args) -> None:
            calls[name] += 1
            launcher(*args)

        return call

    routed = SimpleNamespace(**{name: counted(name, launcher) for name, launcher in cuda.LAUNCHERS.items()})
    for name in ("accept", "compact", "expand_topk", "rerank"):  # copy_rows is torch's own there, and keeps its CPU twin here
        setattr(routed, name, getattr(OPS, name))
    for module in PUBLIC:
        monkeypatch.setattr(importlib.import_module(f"eagle_kernels.{module}"), "OPS", routed)
    monkeypatch.setattr(importlib.import_module("eagle_kernels.head_topk"), "empty_head_topk", tiled_head_topk)
    yield calls


def tiled_head_topk(lead: torch.Size, vocab_size: int, top_k: int, tile: int, device: torch.device) -> HeadTopK:
    """Tiles as on CUDA, full of what must not be read."""
    tiles = -(-vocab_size // tile)
    return HeadTopK(torch.full((*lead, tiles, top_k), 2**62), torch.full((*lead, tiles), float("nan")), torch.full((*lead, tiles), float("nan")))


def rows_target(case: str, **options) -> TargetModel:
    """The target of tiny_targets as CUDA holds it, on the CPU."""
    panels = tiny_target(case, dtype=torch.bfloat16, head_dim=64, **options)
    return TargetModel(panels.config, rows_weights(panels), panels.max_positions, deterministic=True)


def make(target: TargetModel, drafter, **options) -> Engine:
    return Engine(target, drafter, None, EagleConfig(tree="dynamic", max_model_len=320, page_size=16, max_batch_size=2, enforce_eager=True, deterministic=True, **options), eos_token_ids=())


def steps_with_logits(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], dict[int, torch.Tensor], float]:
    """Tokens, position of each committed token -> the target's logits after it, and the acceptance length."""
    rows, recorded = {}, {}
    target, original = engine.models.target, engine.models.target.logits

    def logits(features: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows["last"] = original(features, out)
        return rows["last"]

    request_id = engine.add_request(prompt, params)
    with torch.inference_mode():
        begin_requests(engine)
        request = engine.scheduler.running[0]
        assert request.request_id == request_id
        target.logits = logits
        try:
            while not request.finished:
                start = int(engine.state.seq_lens[0])
                accepted = run_step(engine.models, engine.state, 1, PhaseTimer())
                for i in range(int(accepted.num_accepted_drafts[0]) + 1):
                    recorded[start + i] = rows["last"][int(accepted.accepted_nodes[0, i])].clone()
                request.receive(engine.state.output_ring[0].tolist())
        finally:
            del target.logits
    return request.token_ids, recorded, request.output().stats.acceptance_length


CASES = [
    pytest.param("llama", {}, dict(temperature=0.0), id="llama-greedy"),
    pytest.param("qwen3-tied", {}, dict(temperature=0.9, top_p=0.9, seed=3), id="qwen3-sampled", marks=pytest.mark.slow),
    pytest.param("mistral-window", {}, dict(temperature=0.0), id="mistral-window", marks=pytest.mark.slow),
    pytest.param("mixtral", {}, dict(temperature=0.7, seed=1), id="mixtral", marks=pytest.mark.slow),
    pytest.param("llama-tied-biases-linear", {}, dict(temperature=0.0), id="llama-biases", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case, options, sampling", CASES)
def test_tree_logits_and_tokens_are_those_of_plain_decoding_bit_for_bit(interpreted: Counter, case: str, options: dict, sampling: dict) -> None:
    target = rows_target(case, **options)
    prompt, params = random_tokens(1, 9), SamplingParams(**sampling, max_tokens=8)
    tokens, plain_logits, _ = steps_with_logits(make(target, None), prompt, params)
    drafter = bigram_drafter(target, [prompt + tokens])
    drafted, tree_logits, acceptance_length = steps_with_logits(make(target, drafter, top_k=2, max_depth=3, num_nodes=6), prompt, params)
    assert drafted == tokens
    assert acceptance_length > 1.5
    assert len(plain_logits) >= 7
    for position in plain_logits.keys() & tree_logits.keys():
        assert_exact(tree_logits[position], plain_logits[position])
    used = {"linear", "embedding", "rms_norm", "silu_mul", "rope_store_kv", "tree_attention", "sample", "advance"}
    assert used <= {name for name, count in interpreted.items() if count > 0}


def test_changed_logits_and_logprobs_on_the_triton_kernels(interpreted: Counter) -> None:
    """Requests that change their logits beside one that does not, in rows of an odd vocabulary, so that slices of a batch are not aligned."""
    target = rows_target("llama")
    prompts = [random_tokens(3 + i, 4 + i) for i in range(2)]
    changed = dict(temperature=0.9, seed=2, max_tokens=6, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={7: 3.0, 9: -100.0}, logprobs=2, prompt_logprobs=1)
    params = [SamplingParams(temperature=0.0, max_tokens=6), SamplingParams(**changed)]
    expected = [make(target, None).generate([prompt], param)[0] for prompt, param in zip(prompts, params)]
    assert expected[1].token_ids != make(target, None).generate([prompts[1]], SamplingParams(temperature=0.9, seed=2, max_tokens=6))[0].token_ids
    drafter = bigram_drafter(target, [prompt + output.token_ids for prompt, output in zip(prompts, expected)])
    outputs = make(target, drafter, top_k=2, max_depth=3, num_nodes=6).generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert outputs[1].outputs[0].logprobs == expected[1].outputs[0].logprobs and outputs[1].prompt_logprobs == expected[1].prompt_logprobs
    assert outputs[1].stats.acceptance_length > 1.5 and interpreted["logits_topk"] > 0


def test_a_drafter_on_the_triton_kernels(interpreted: Counter) -> None:
    """A real drafter layer, and head_topk whose tiles expand_topk merges."""
    target = rows_target("llama", vocab_size=150, hidden_size=64)
    prompt, params = random_tokens(2, 5), SamplingParams(temperature=0.0, max_tokens=4)
    tokens, _, _ = steps_with_logits(make(target, None), prompt, params)
    drafted, _, _ = steps_with_logits(make(target, random_drafter(target, num_attention_heads=1, num_key_value_heads=1), top_k=2, max_depth=2, num_nodes=4), prompt, params)
    assert drafted == tokens
    assert interpreted["head_topk"] > 0


@pytest.mark.parametrize("options", [{}, pytest.param(dict(fc_norm=True, norm_output=True), marks=pytest.mark.slow)], ids=["eagle-3", "eagle-3.1"])
def test_an_eagle3_drafter_on_the_triton_kernels(interpreted: Counter, options: dict) -> None:
    """A real drafter, and one that knows the answer and runs a real one: after a few steps the states that wait for the drafter, in bf16, are those of a fresh prefill."""
    target = rows_target("llama", vocab_size=150, hidden_size=64)
    layers = dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2], eagle_aux_hidden_state_layer_id_convention="input")
    real = random_eagle3(target, draft_vocab_size=130, head_dim=64, num_attention_heads=1, num_key_value_heads=1, **layers, **options)
    prompt, params = random_tokens(2, 5), SamplingParams(temperature=0.0, max_tokens=6)
    tokens, _, _ = steps_with_logits(make(target, None), prompt, SamplingParams(temperature=0.0, max_tokens=9))  # as many as the last step may commit
    for drafter in (real, bigram_drafter(target, [prompt + tokens], real)):
        engine = make(target, drafter, top_k=2, max_depth=2, num_nodes=4)
        drafted, _, acceptance_length = steps_with_logits(engine, prompt, params)
        assert drafted == tokens[:6]
    assert acceptance_length > 1.2 and interpreted["head_topk"] > 0
    state = engine.state
    assert state.pending_features.dtype == torch.bfloat16 and state.pending_features.shape[-1] == 3 * 64
    seq_len, count = int(state.seq_lens[0]), int(state.num_pending[0])
    cache, text = torch.zeros_like(state.target_cache), prompt + tokens
    assert seq_len < len(text)
    ids, pages = torch.tensor([text[:seq_len]]), torch.arange(cache.shape[2] - 1, dtype=torch.int32)[None]
    _, states = target.forward_with_states(real.captured_layers, ids, torch.arange(seq_len)[None], cache, torch.zeros(1, dtype=torch.int32), pages)
    assert_exact(state.pending_features[0, :count], states[0, seq_len - count :].contiguous())
