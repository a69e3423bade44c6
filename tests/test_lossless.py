"""The product: the same tokens as plain decoding, at any temperature, bit for bit."""

import eagle_engine.step as step
import eagle_kernels
import pytest
import torch
from eagle_engine import SamplingParams
from eagle_engine.step import PhaseTimer, run_step
from helpers import assert_exact
from tiny_engines import DRAFTERS, TREES, begin_requests, bigram_drafter, make_engine, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import CASES, random_tokens

SAMPLING = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.7, seed=5),
    "filtered": dict(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02, seed=-3),
}


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_speculative_equals_plain(case, tree, sampling):
    target = tiny_target(case)
    params = SamplingParams(**SAMPLING[sampling], max_tokens=30)
    prompt = random_tokens(1, 11)
    expected = plain_tokens(target, prompt, params)
    for drafter in (random_drafter(target), bigram_drafter(target, [prompt + expected])):
        output = make_engine(target, drafter, **TREES[tree]).generate([prompt], params)[0]
        assert output.token_ids == expected
        assert output.finish_reason == "length"
    # The second drafter has seen the answer: an engine that never accepts would pass the comparison above.
    assert output.stats.acceptance_length > 1.5


@pytest.mark.parametrize("order", ["hf", "vllm"])
def test_speculative_equals_plain_in_both_filter_orders(order):
    target = tiny_target("llama")
    params = SamplingParams(temperature=1.3, top_k=30, top_p=0.8, min_p=0.05, seed=9, max_tokens=40)
    prompt = random_tokens(2, 7)
    expected = plain_tokens(target, prompt, params, filter_order=order)
    drafter = bigram_drafter(target, [prompt + expected])
    assert make_engine(target, drafter, filter_order=order).generate([prompt], params)[0].token_ids == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_tree_logits_are_those_of_plain_decoding_bit_for_bit(tree, dtype):
    """Of every node on the accepted path, over many steps and lengths (the 64-row block edge is crossed)."""
    target = tiny_target("llama", dtype=dtype)
    prompt = random_tokens(3, 55)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    answer = plain_tokens(target, prompt, params)
    plain_logits = record_logits(make_engine(target, None, enforce_eager=True), prompt, params)
    engine = make_engine(target, oracle_drafter(target, prompt + answer, ranks=[0, 1, 0, 2, 0, 0, 7]), enforce_eager=True, **TREES[tree])
    tree_logits = record_logits(engine, prompt, params)
    assert len(plain_logits) >= 29 and len(tree_logits) >= 29
    for position in plain_logits.keys() & tree_logits.keys():
        assert_exact(tree_logits[position], plain_logits[position])


def record_logits(engine, prompt, params) -> dict[int, torch.Tensor]:
    """Position of a committed token -> the target's logits after it."""
    engine.add_request(prompt, params)
    begin_requests(engine)
    rows, recorded = {}, {}
    target = engine.models.target
    original = target.logits

    def logits(features, out=None):
        rows["last"] = original(features, out)
        return rows["last"]

    target.logits = logits
    try:
        while engine.scheduler.running:
            start = int(engine.state.seq_lens[0])
            accepted = run_step(engine.models, engine.state, 1, PhaseTimer())
            for i in range(int(accepted.num_accepted_drafts[0]) + 1):
                recorded[start + i] = rows["last"][int(accepted.accepted_nodes[0, i])].clone()
            count = int(engine.state.num_pending[0])
            request = engine.scheduler.running[0]
            request.append(engine.state.pending_tokens[0, :count].tolist())
            if request.finished:
                engine.scheduler.retire(request)
    finally:
        del target.logits
    return recorded


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_batch_of_unequal_prompts_equals_single_runs(tree):
    target = tiny_target("llama-llama3-rope-head-dim")
    prompts = [random_tokens(10 + i, length) for i, length in enumerate((1, 70, 3, 17, 64, 9))]
    params = [SamplingParams(temperature=0.0 if i % 2 else 0.9, top_p=0.95, seed=i, max_tokens=6 + 5 * i) for i in range(len(prompts))]
    expected = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, params)]
    drafter = bigram_drafter(target, [prompt + answer for prompt, answer in zip(prompts, expected)])
    for candidate in (drafter, random_drafter(target)):
        engine = make_engine(target, candidate, max_batch_size=4, **TREES[tree])
        outputs = engine.generate(prompts, params)
        assert [output.token_ids for output in outputs] == expected
        assert engine.pages.num_free == engine.pages.num_pages


def test_threads_and_instruction_sets_change_nothing(restore_num_threads):
    target = tiny_target("qwen3-tied")
    prompt, params = random_tokens(20, 40), SamplingParams(temperature=0.8, seed=1, max_tokens=25)
    expected = plain_tokens(target, prompt, params)
    previous = eagle_kernels.isa()
    try:
        for isa in eagle_kernels.available_isas():
            for threads in (1, 2, 3):
                eagle_kernels.set_isa(isa)
                torch.set_num_threads(threads)
                assert make_engine(target, random_drafter(target)).generate([prompt], params)[0].token_ids == expected
    finally:
        eagle_kernels.set_isa(previous)


@pytest.mark.parametrize("chunk", [1, 5, 64, 256])
def test_prefill_chunks_change_nothing(chunk):
    target = tiny_target("mistral-window")
    prompt, params = random_tokens(21, 70), SamplingParams(temperature=0.0, max_tokens=20)
    expected = plain_tokens(target, prompt, params)
    assert make_engine(target, random_drafter(target), prefill_chunk=chunk).generate([prompt], params)[0].token_ids == expected


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_replay_equals_eager(tree, kind):
    """States and logits of every step, over batches that shrink and lengths that differ, as bits."""
    target = tiny_target("qwen2", num_hidden_layers=7)
    prompts = [random_tokens(90 + i, length) for i, length in enumerate((5, 66, 20))]
    params = [SamplingParams(temperature=0.0, max_tokens=8 + 9 * i) for i in range(3)]
    seen = {}
    for eager in (False, True):
        engine = make_engine(target, DRAFTERS[kind](target), enforce_eager=eager, **TREES[tree])
        assert (engine.models.graphs is None) == eager
        seen[eager] = record_verify(engine, prompts, params)
    assert len(seen[True]) == len(seen[False]) > 20
    for replayed, expected in zip(seen[False], seen[True]):
        for a, b in zip(replayed, expected):
            assert_exact(a, b)


def record_verify(engine, prompts, params) -> list[tuple[torch.Tensor, torch.Tensor]]:
    seen = []
    original = step.verify

    def verify(*args):
        states, logits = original(*args)
        seen.append((states.clone(), logits.clone()))
        return states, logits

    step.verify = verify
    try:
        engine.generate(prompts, params)
    finally:
        step.verify = original
    return seen


def test_page_size_changes_nothing():
    target = tiny_target("mixtral")
    prompt, params = random_tokens(22, 30), SamplingParams(temperature=0.6, seed=4, max_tokens=20)
    outputs = {size: make_engine(target, random_drafter(target), page_size=size).generate([prompt], params)[0].token_ids for size in (1, 3, 16, 64)}
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1


def test_same_seed_same_text_and_no_seed_differs():
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target))
    prompt = random_tokens(23, 5)
    seeded, unseeded = SamplingParams(temperature=2.0, seed=7, max_tokens=20), SamplingParams(temperature=2.0, max_tokens=20)
    first, second = (output.token_ids for output in engine.generate([prompt, prompt], seeded))
    third, fourth = (output.token_ids for output in engine.generate([prompt, prompt], unseeded))
    assert first == second
    assert third != fourth


@pytest.mark.parametrize("options", [*TREES.values(), dict(tree="chain", max_depth=1), dict(top_k=1, max_depth=5, num_nodes=6)], ids=str)
def test_oracle_gives_the_greatest_acceptance_length(options):
    target = tiny_target("llama")
    prompt = random_tokens(24, 6)
    engine = make_engine(target, oracle_drafter(target, prompt), **options)
    max_depth = engine.models.shape.max_depth
    params = SamplingParams(temperature=0.0, max_tokens=1 + 5 * (max_depth + 1))
    text = prompt + plain_tokens(target, prompt, params)
    output = make_engine(target, oracle_drafter(target, text), **options).generate([prompt], params)[0]
    assert output.token_ids == text[len(prompt) :]
    assert output.stats.steps == 5
    assert output.stats.acceptance_length == max_depth + 1
    assert output.stats.acceptance_by_depth == [1.0] * max_depth


def test_chain_equals_dynamic_tree_of_one_child():
    target = tiny_target("llama")
    prompt, params = random_tokens(25, 6), SamplingParams(temperature=0.0, max_tokens=40)
    drafter = bigram_drafter(target, [prompt + plain_tokens(target, prompt, params)])
    chain = make_engine(target, drafter, tree="chain", max_depth=4).generate([prompt], params)[0]
    dynamic = make_engine(target, drafter, tree="dynamic", top_k=1, max_depth=4, num_nodes=5).generate([prompt], params)[0]
    assert chain.token_ids == dynamic.token_ids
    assert chain.stats.steps == dynamic.stats.steps
    assert chain.stats.acceptance_by_depth == dynamic.stats.acceptance_by_depth


def test_more_nodes_never_lower_the_accepted_length():
    target = tiny_target("llama")
    prompt, params = random_tokens(26, 6), SamplingParams(temperature=0.0, max_tokens=60)
    text = prompt + plain_tokens(target, prompt, params)
    increased = 0
    for length in range(len(prompt), len(text) - 8):
        accepted = []
        for num_nodes in (1, 2, 3, 5, 8, 13, 21, 31):
            drafter = oracle_drafter(target, text, ranks=[0, 1, 0, 2, 1, 0, 0])
            engine = make_engine(target, drafter, tree="dynamic", top_k=3, max_depth=4, num_nodes=num_nodes)
            engine.add_request(text[:length], params)
            begin_requests(engine)
            accepted.append(int(run_step(engine.models, engine.state, 1, PhaseTimer()).num_accepted_drafts[0]))
        assert accepted == sorted(accepted)
        increased += accepted[-1] > accepted[1]
    assert increased > 0
