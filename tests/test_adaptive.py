"""Trees that size themselves: the text never depends on the size, the drafter catches up on what it has missed, and the choice is the one that pays."""

import random

import pytest
import torch
from eagle_engine import EagleConfig, SamplingParams, step
from eagle_engine.engine_core import MAX_BEHIND
from eagle_engine.state import GAIN_UNITS
from eagle_engine.step import catch_up, draft
from eagle_engine.tree_gains import measure_gains
from eagle_engine.tree_shape import tree_shapes
from helpers import assert_exact
from test_step_graphs import CountingGraphs
from tiny_engines import DRAFTERS, begin_requests, bigram_drafter, first_draft, make_engine, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import random_tokens

ADAPTIVE = EagleConfig(tree="adaptive")
SHAPES = tree_shapes(ADAPTIVE)


def choose_at_random(engine, seed: int, *, plain: float) -> list[int]:
    """Let the engine's trees be of random sizes: phases without any, as long as `plain` says on average, between others. The list of what was chosen."""
    generator, chosen, left = random.Random(seed), [], [0]

    def choose(gains, context) -> int:
        if left[0] == 0 and generator.random() < 0.3:
            left[0] = 1 + int(generator.expovariate(1 / plain))
        if left[0] > 0:
            left[0] -= 1
            chosen.append(0)
        else:
            chosen.append(generator.randrange(1, len(engine.shapes)))
        return chosen[-1]

    engine.sizes.choose = choose
    return chosen


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", DRAFTERS, ids=str)
def test_any_sequence_of_sizes_gives_the_text_of_plain_decoding(kind, captured):
    target = tiny_target("llama", num_hidden_layers=7)
    prompts = [random_tokens(1 + i, 3 + 9 * i) for i in range(5)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40 + 10 * i) for i in range(5)]
    expected = [plain_tokens(target, prompt, param) for prompt, param in zip(prompts, params)]
    drafter = bigram_drafter(target, [prompt + text for prompt, text in zip(prompts, expected)], DRAFTERS[kind](target))
    engine = make_engine(target, drafter, tree="adaptive", max_batch_size=3, num_pages=52, graph_api=CountingGraphs() if captured else None)
    chosen = choose_at_random(engine, 3, plain=4)
    assert [output.token_ids for output in engine.generate(prompts, params)] == expected
    assert len(set(chosen)) > 10 and engine.pages.num_held == 0
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", DRAFTERS, ids=str)
@pytest.mark.parametrize("plain_steps", [1, 7, MAX_BEHIND - 1, MAX_BEHIND, MAX_BEHIND + 30])
def test_a_drafter_that_catches_up_is_that_of_a_fresh_prefill(kind, plain_steps):
    """After plain decoding, however long, a draft finds the cache of one that was never behind, and drafts the same, as bytes."""
    target = tiny_target("llama", num_hidden_layers=7)
    prompt = random_tokens(28, 13)
    text = prompt + plain_tokens(target, prompt, SamplingParams(temperature=0.0, max_tokens=150))
    drafter = oracle_drafter(target, text, ranks=[0, 1, 0, 0, 2, 0, 5], drafter=DRAFTERS[kind](target))
    engine = make_engine(target, drafter, tree="adaptive")
    # Two drafts, the pending pairs of the second of which are left behind too.
    plan = iter([15, 9] + [0] * plain_steps)
    engine.sizes.choose = lambda gains, context: next(plan)
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=150))
    for _ in range(2 + plain_steps):
        engine.step()
    state = engine.state
    seq_len = int(state.seq_lens[0])
    assert 0 < int(state.num_missed[0]) <= engine.scheduler.running[0].num_missed <= MAX_BEHIND
    plan = iter([15])
    with torch.inference_mode():
        engine._choose_shape(engine.scheduler.running)
        assert int(state.num_missed[0]) == 0
        pool, _ = draft(engine.models, state, 1)
        fresh = make_engine(target, drafter, tree="adaptive")
        fresh.add_request(text[:seq_len], SamplingParams(temperature=0.0, max_tokens=30))
        begin_requests(fresh)
        expected, _ = draft(fresh.models, fresh.state, 1)
    for a, b in zip(pool, expected):
        assert_exact(a, b)
    rows = [e.state.draft_cache[0][:, e.state.page_table[0].long()].flatten(1, 2)[:, :seq_len] for e in (engine, fresh)]
    assert_exact(rows[0].contiguous(), rows[1].contiguous())


def test_requests_that_join_while_nothing_is_drafted_are_not_behind():
    target = tiny_target("llama")
    drafter = random_drafter(target)
    engine = make_engine(target, drafter, tree="adaptive")
    engine.sizes.choose = lambda gains, context: 0
    params = SamplingParams(temperature=0.0, max_tokens=60)
    prompts = [random_tokens(5, 9), random_tokens(6, 30)]
    ids = [engine.add_request(prompts[0], params)]
    for _ in range(20):
        engine.step()
    ids.append(engine.add_request(prompts[1], params))
    for _ in range(3):
        engine.step()
    assert engine.state.num_missed[:2].tolist() == [23, 3]
    engine.sizes.choose = lambda gains, context: 12
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
    assert [outputs[i] for i in ids] == [plain_tokens(target, prompt, params) for prompt in prompts]


def test_what_earlier_requests_have_missed_is_nobodys_concern(monkeypatch):
    """The drafter catches up when somebody who runs is far behind, by as many pairs as the furthest is."""
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), tree="adaptive", enable_prefix_caching=False)
    engine.sizes.choose = lambda gains, context: 0
    rows = []
    monkeypatch.setattr("eagle_engine.engine_core.catch_up", lambda models, state, batch, count: rows.append(count) or catch_up(models, state, batch, count))
    for seed in range(4):
        engine.generate([random_tokens(seed, 9)], SamplingParams(temperature=0.0, max_tokens=MAX_BEHIND - 4))
    assert rows == []
    engine.generate([random_tokens(9, 9)], SamplingParams(temperature=0.0, max_tokens=2 * MAX_BEHIND))
    assert rows == [MAX_BEHIND]


def test_a_draft_takes_as_many_pending_pairs_as_the_last_step_can_have_left(monkeypatch):
    """Rows beside these cost time and tell nothing; where steps are measured, too. Captured steps have one shape for all."""
    target = tiny_target("llama")
    for captured in (False, True):
        engine = make_engine(target, random_drafter(target), tree="adaptive", enable_prefix_caching=False, graph_api=CountingGraphs() if captured else None)
        taken, extend = [], step.extend
        monkeypatch.setattr(step, "extend", lambda drafter, state, batch, rows: taken.append(rows) or extend(drafter, state, batch, rows))
        chosen = choose_at_random(engine, 5, plain=1)
        engine.generate([random_tokens(5, 9)], SamplingParams(temperature=0.0, max_tokens=60))
        depths = [engine.shapes[index].max_depth for index in chosen]
        assert len(set(depths)) > 4
        assert set(taken) == {None} if captured else taken == [before + 1 for before, depth in zip([0, *depths], depths) if depth > 0]
        if not captured:
            taken.clear()
            with torch.inference_mode():
                engine._run_dummies_and_wait(1, 5)
            assert taken == [engine.shapes[5].max_depth + 1]
        monkeypatch.undo()


def test_a_request_that_goes_on_has_missed_nothing():
    """What the drafter had missed of it before it was preempted is in its prefill."""
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), tree="adaptive", enable_prefix_caching=False)
    engine.sizes.choose = lambda gains, context: 0
    engine.add_request(random_tokens(5, 9), SamplingParams(temperature=0.0, max_tokens=60))
    for _ in range(20):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    for _ in range(4):
        engine.step()
    assert engine.scheduler.running[0].num_missed == int(engine.state.num_missed[0]) == 4


@pytest.mark.parametrize("tokens, cached", [(30, 8), (MAX_BEHIND + 20, 72)], ids=["behind", "caught-up-once"])
def test_rows_that_the_drafter_has_missed_are_not_found_by_others(tokens, cached):
    """A request that ends while the drafter is behind leaves only what is final in both caches."""
    target = tiny_target("llama")
    drafter = random_drafter(target)
    engine = make_engine(target, drafter, tree="adaptive")
    engine.sizes.choose = lambda gains, context: 0
    prompt, params = random_tokens(7, 10), SamplingParams(temperature=0.0, max_tokens=tokens)
    answer = engine.generate([prompt], params)[0].token_ids
    turn = prompt + answer + [3]
    warm, cold = engine, make_engine(target, drafter, tree="adaptive")
    pools = [first_draft(one, turn, params) for one in (warm, cold)]
    assert warm.scheduler.running[0].output().stats.num_cached_tokens == cached
    for a, b in zip(*pools):
        assert_exact(a, b)


def test_slots_without_a_request_miss_nothing():
    """A captured step runs over its whole bucket: what dummies would miss has no room, however long nothing is drafted."""
    target = tiny_target("llama")
    prompts, params = [random_tokens(i, 9) for i in range(3)], SamplingParams(temperature=0.0, max_tokens=2 * MAX_BEHIND)
    engine = make_engine(target, random_drafter(target), tree="adaptive", max_batch_size=4, graph_api=CountingGraphs())
    engine.sizes.choose = lambda gains, context: 0
    assert [output.token_ids for output in engine.generate(prompts, params)] == [plain_tokens(target, prompt, params) for prompt in prompts]
    assert engine.state.num_missed.tolist() == [0] * 4


# What trees of other sizes would have brought


def test_gains_are_the_path_confidences_of_the_trees_that_the_shapes_would_have_grown():
    target = tiny_target("llama", num_hidden_layers=7)
    drafter = DRAFTERS["eagle-3"](target)
    prompt = random_tokens(9, 15)
    engine = make_engine(target, drafter, tree="adaptive")
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    begin_requests(engine)
    for executed in (SHAPES[-1], SHAPES[7]):
        with torch.inference_mode():
            pool, _ = draft(engine.models._replace(shape=executed), engine.state, 1)
            gains = torch.full((1, len(SHAPES) - 1), 77)
            measure_gains(pool, executed, SHAPES[1:], gains)
        for shape, gain in zip(SHAPES[1:], gains[0].tolist()):
            if shape.max_depth > executed.max_depth:
                assert gain == -1
                continue
            fixed = make_engine(target, drafter, top_k=4, max_depth=shape.max_depth, num_nodes=shape.num_nodes, enforce_eager=True)
            seen = []
            with fixed.observing(lambda ids, trees, seen=seen: seen.extend(trees)):
                fixed.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20))
                fixed.step()
            assert gain / GAIN_UNITS == pytest.approx(sum(seen[0].path_confidences[1:]), abs=1e-4)


def test_scores_that_are_nan_promise_nothing():
    shape = SHAPES[-1]
    scores = torch.full((2, shape.pool_size), float("nan"))
    scores[1, 0] = 0.0
    scores[1, 1:] = -float("inf")
    pool = type("Pool", (), {"scores": scores})
    gains = torch.zeros(2, len(SHAPES) - 1, dtype=torch.int64)
    measure_gains(pool, shape, SHAPES[1:], gains)
    assert gains[0].tolist() == [0] * (len(SHAPES) - 1)
    assert gains[1].tolist() == [GAIN_UNITS] * (len(SHAPES) - 1)


def test_a_captured_adaptive_step_is_one_launch_and_one_copy():
    target = tiny_target("llama")
    prompt, params = random_tokens(1, 9), SamplingParams(temperature=0.0, max_tokens=30)
    answer = plain_tokens(target, prompt, params)
    api = CountingGraphs()
    engine = make_engine(target, oracle_drafter(target, prompt + answer), tree="adaptive", max_batch_size=2, graph_api=api)
    assert api.events.count("capture") == 2 * len(SHAPES)
    api.events.clear()
    output = engine.generate([prompt], params)[0]
    assert output.token_ids == answer
    steps = output.stats.steps + 1
    assert api.events == ["replay", "copy"] + ["replay", "copy", "wait"] * (steps - 1)
