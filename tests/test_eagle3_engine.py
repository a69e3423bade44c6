"""EAGLE-3 through the whole engine: the tokens of plain decoding, whatever the drafter, the tree, the batch and the way a step is run."""

import pytest
import torch
from drafter_files import LAYOUTS, write_drafter
from eagle_engine import EagleConfig, EagleError, Engine, SamplingParams
from eagle_engine.drafter import Drafter
from eagle_engine.step import PhaseTimer, run_step
from helpers import assert_exact
from test_step_graphs import graphed
from tiny_engines import DRAFTERS, TREES, begin_requests, bigram_drafter, eagle3_config, make_engine, oracle_drafter, plain_tokens, random_eagle3, random_tensors, tiny_target
from tiny_targets import CASES, VOCAB_SIZE, random_tokens

SAMPLING = {"greedy": dict(temperature=0.0), "sampled": dict(temperature=0.8, top_p=0.95, seed=5)}
KINDS = [kind for kind in DRAFTERS if kind != "eagle-1"]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_speculative_equals_plain(case, tree, sampling):
    """With a drafter that is as often right as chance, and with one that has seen the answer and runs a real one, whose states and cache move through the engine."""
    target = tiny_target(case, num_hidden_layers=7)
    params = SamplingParams(**SAMPLING[sampling], max_tokens=30)
    prompt = random_tokens(1, 11)
    expected = plain_tokens(target, prompt, params)
    real = random_eagle3(target, draft_vocab_size=77)
    for drafter in (real, bigram_drafter(target, [prompt + expected], real)):
        output = make_engine(target, drafter, **TREES[tree]).generate([prompt], params)[0]
        assert output.token_ids == expected
    assert output.stats.acceptance_length > 1.3  # a few tokens of the answer are not in the draft vocabulary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_batch_of_unequal_prompts_equals_single_runs(tree, kind):
    target = tiny_target("llama-llama3-rope-head-dim", num_hidden_layers=7)
    prompts = [random_tokens(10 + i, length) for i, length in enumerate((1, 70, 3, 17, 64, 9))]
    params = [SamplingParams(temperature=0.0 if i % 2 else 0.9, top_p=0.95, seed=i, max_tokens=6 + 5 * i) for i in range(len(prompts))]
    expected = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, params)]
    real = DRAFTERS[kind](target)
    for candidate in (real, bigram_drafter(target, [prompt + answer for prompt, answer in zip(prompts, expected)], real)):
        engine = make_engine(target, candidate, max_batch_size=4, **TREES[tree])
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
        assert engine.pages.num_free == engine.pages.num_pages


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_captured_steps_emit_the_tokens_of_plain_decoding(case, tree):
    target = tiny_target(case, num_hidden_layers=7)
    params = [SamplingParams(temperature=0.0, max_tokens=23), SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=17), SamplingParams(temperature=0.0, max_tokens=1)]
    prompts = [random_tokens(seed, length) for seed, length in ((1, 11), (2, 5), (3, 30))]
    expected = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, params)]
    drafter = bigram_drafter(target, [prompt + tokens for prompt, tokens in zip(prompts, expected)], random_eagle3(target))
    engine, api = graphed(target, drafter, **TREES[tree])
    assert [output.token_ids for output in engine.generate(prompts, params)] == expected
    assert api.events.count("capture") == 3  # of batches 1, 2 and 4


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_chunks_leave_the_same_drafter_behind(kind, chunk):
    """Cache, pending states and tokens after a prompt of 70."""
    target = tiny_target("mistral-window", num_hidden_layers=7)
    engines = [make_engine(target, DRAFTERS[kind](target), prefill_chunk=size) for size in (256, chunk)]
    for engine in engines:
        engine.add_request(random_tokens(21, 70), SamplingParams(temperature=0.0, max_tokens=8))
        with torch.inference_mode():
            begin_requests(engine)
    whole, chunked = (engine.state for engine in engines)
    assert_exact(chunked.pending_features, whole.pending_features)
    rows = [state.draft_cache[0][:, state.page_table[0].long()].flatten(1, 2)[:, :69] for state in (whole, chunked)]
    assert_exact(rows[1].contiguous(), rows[0].contiguous())


@pytest.mark.parametrize("kind", KINDS)
def test_pending_states_after_a_step_are_those_of_a_fresh_prefill(kind):
    """What `advance` hands to the next draft: the captured states of the accepted rows, in their order."""
    target = tiny_target("qwen3-tied", num_hidden_layers=7)
    prompt, params = random_tokens(28, 13), SamplingParams(temperature=0.0, max_tokens=60)
    text = prompt + plain_tokens(target, prompt, params)
    real = DRAFTERS[kind](target)
    engine = make_engine(target, oracle_drafter(target, text, ranks=[0, 1, 0, 0, 2, 0, 7], drafter=real), **TREES["dynamic-wide"])
    engine.add_request(prompt, params)
    begin_requests(engine)
    lengths = set()
    for _ in range(6):
        with torch.inference_mode():
            run_step(engine.models, engine.state, 1, PhaseTimer())
        seq_len, count = int(engine.state.seq_lens[0]), int(engine.state.num_pending[0])
        lengths.add(count)
        cache = torch.full_like(engine.state.target_cache, float("nan"))
        pages = torch.arange(cache.shape[2], dtype=torch.int32)[None]
        with torch.inference_mode():
            ids = torch.tensor([text[:seq_len]])
            _, states = target.forward_with_states(real.captured_layers, ids, torch.arange(seq_len)[None], cache, torch.zeros(1, dtype=torch.int32), pages)
        assert states.shape[-1] == real.config.fused_size == 144
        assert_exact(engine.state.pending_features[0, :count], states[0, seq_len - count :].contiguous())
        assert engine.state.pending_tokens[0, :count].tolist() == text[seq_len - count + 1 : seq_len + 1]
    assert len(lengths) > 1


def test_a_drafter_made_for_32_positions_serves_longer_sequences():
    target = tiny_target("llama", num_hidden_layers=7)
    prompt, params = random_tokens(5, 40), SamplingParams(temperature=0.0, max_tokens=60)
    expected = plain_tokens(target, prompt, params)
    short, long = (random_eagle3(target, max_position_embeddings=length, draft_vocab_size=VOCAB_SIZE) for length in (32, 512))
    outputs = [make_engine(target, drafter, **TREES["dynamic-wide"]).generate([prompt], params)[0] for drafter in (short, long)]
    assert [output.token_ids for output in outputs] == [expected, expected]
    assert outputs[0].stats.acceptance_by_depth == outputs[1].stats.acceptance_by_depth


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_change_no_token(kind):
    target = tiny_target("llama", num_hidden_layers=7, dtype=torch.bfloat16)
    prompt, params = random_tokens(1, 11), SamplingParams(temperature=0.0, max_tokens=30)
    expected = plain_tokens(target, prompt, params)
    real = DRAFTERS[kind](target)
    output = make_engine(target, bigram_drafter(target, [prompt + expected], real), **TREES["dynamic-wide"]).generate([prompt], params)[0]
    assert output.token_ids == expected and output.stats.acceptance_length > 1.2


def test_draft_tokens_are_target_tokens():
    """Everything drafted is in the draft vocabulary, by its target id; a vocabulary of 83 and of 57 is no multiple of any tile."""
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = random_eagle3(target)
    engine = make_engine(target, drafter, top_k=5, max_depth=4, num_nodes=60)
    engine.add_request(random_tokens(5, 9), SamplingParams(temperature=0.0, max_tokens=9))
    with torch.inference_mode():
        begin_requests(engine)
        run_step(engine.models, engine.state, 1, PhaseTimer())
    drafted = set(engine.state.pool_tokens[0].tolist())
    assert drafted <= set(drafter.draft_to_target.tolist()) and len(drafted) > 5
    best = drafter.logits(first_features(engine, drafter))[0, 0].topk(5).indices
    assert engine.state.pool_tokens[0, :5].tolist() == drafter.draft_to_target[best].tolist()


def first_features(engine, drafter):
    """The feature after the prompt and the first token, from the prompt alone."""
    target, prompt = engine.models.target, random_tokens(5, 9)
    fresh = make_engine(target, drafter)
    fresh.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=9))
    with torch.inference_mode():
        begin_requests(fresh)
        state = fresh.state
        position, lens = torch.tensor([[8]]), torch.tensor([8], dtype=torch.int32)
        return drafter.forward(state.root_tokens[:1, None], drafter.fuse(state.pending_features[:1, :1]), position, state.draft_cache[0], lens, state.page_table[:1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_drafts_the_same(tmp_path, layout):
    target = tiny_target("llama", num_hidden_layers=7)
    raw = eagle3_config(target, draft_vocab_size=77)
    prompt, params = random_tokens(3, 9), SamplingParams(temperature=0.0, max_tokens=40)
    directory = write_drafter(tmp_path / "d", *LAYOUTS[layout](raw, random_tensors(raw)))
    drafters = [Drafter.from_directory(directory, target, max_positions=512), random_eagle3(target, draft_vocab_size=77)]
    outputs = [make_engine(target, drafter, **TREES["dynamic-wide"]).generate([prompt], params)[0] for drafter in drafters]
    assert outputs[0].token_ids == outputs[1].token_ids == plain_tokens(target, prompt, params)
    assert outputs[0].stats.acceptance_by_depth == outputs[1].stats.acceptance_by_depth


@pytest.mark.parametrize("tree", ["chain", "static"])
def test_rejection_acceptance_at_temperature_zero_is_greedy(tree):
    """Its distribution is that of plain decoding too: test_output_distribution.py."""
    target = tiny_target("llama", num_hidden_layers=7)
    prompt, params = random_tokens(6, 7), SamplingParams(temperature=0.0, max_tokens=30)
    expected = plain_tokens(target, prompt, params)
    drafter = bigram_drafter(target, [prompt + expected], random_eagle3(target, draft_vocab_size=70))
    output = make_engine(target, drafter, acceptance="rejection", **TREES[tree]).generate([prompt], params)[0]
    assert output.token_ids == expected and output.stats.acceptance_length > 1.2


def test_draft_vocabulary_smaller_than_top_k_is_refused():
    target = tiny_target("llama", num_hidden_layers=7)
    with pytest.raises(EagleError, match="top_k 10 is more than the drafter's vocabulary of 8"):
        make_engine(target, random_eagle3(target, draft_vocab_size=8), top_k=10, max_depth=2, num_nodes=20)


def test_memory_counts_the_drafters_own_head():
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = random_eagle3(target)
    weights = [tensor for name, tensor in random_tensors(eagle3_config(target)).items() if tensor.dim() == 2 and name != "lm_head.weight"]
    padded_head = 64 * 48 * 4  # 57 rows in panels of 16
    assert Engine(target, drafter, None, EagleConfig(tree="dynamic", max_model_len=100), eos_token_ids=()).memory_bytes["drafter"] == pytest.approx(sum(tensor.numel() for tensor in weights) * 4 + padded_head, rel=0.02)
