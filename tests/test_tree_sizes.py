"""The choice of a tree by what steps cost and what trees have brought, and the profile of what they cost."""

import json
import random

import pytest
from eagle_engine import EagleConfig, EagleError, SamplingParams
from eagle_engine.cost_profile import CostProfile, load_profile, measure_profile, save_profile
from eagle_engine.tree_gains import measure_gains
from eagle_engine.tree_shape import PLAIN, tree_shapes
from eagle_engine.tree_sizes import AFFORDABLE, DEEP_LOOKS, FIRST_PROBE, KEPT, LAST_PROBE, MARGIN, NEAR, REFRESH, SETTLED, STAYS, TreeSizes
from test_step_graphs import CountingGraphs
from tiny_engines import made_up_profile, make_engine, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import random_tokens

ADAPTIVE = EagleConfig(tree="adaptive")
SHAPES = tree_shapes(ADAPTIVE)


# The choice


def drive(sizes: TreeSizes, steps: int, promised: float, accepted: float, batch: int = 1, seed: int = 0) -> list[int]:
    """Steps of sequences whose drafter promises a share of each level's drafts and gets another accepted; what was chosen."""
    generator, gains, chosen = random.Random(seed), [[] for _ in range(batch)], []
    for _ in range(steps):
        index = sizes.choose(gains, 100)
        chosen.append(index)
        executed = sizes.shapes[index]
        measured = [sum(promised**d for d in range(1, shape.max_depth + 1)) if shape.max_depth <= executed.max_depth else -1.0 for shape in sizes.shapes[1:]]
        for b in range(batch):
            reached = 0
            while reached < executed.max_depth and generator.random() < accepted:
                reached += 1
            gains[b] = sizes.observe(index, gains[b], measured, reached)
    return chosen


def sizes_with(**costs) -> TreeSizes:
    return TreeSizes(SHAPES, made_up_profile(ADAPTIVE, **costs))


def test_a_drafter_that_knows_nothing_is_left_alone():
    chosen = drive(sizes_with(), 2000, 0.02, 0.0)  # and is honest about it
    drafted = [i for i, index in enumerate(chosen) if index != 0]
    assert len(drafted) < 20 + 2000 // LAST_PROBE + 5
    assert all(index == 0 for index in chosen[60:64])
    # Tried again later and later, by the cheapest tree.
    probes = [i for i in drafted if i > 60]
    assert probes and all(chosen[i] == 1 for i in probes)
    assert all(b - a >= FIRST_PROBE for a, b in zip(probes, probes[1:]))


def test_a_drafter_that_is_sure_of_what_is_wrong_costs_little():
    for node in (0.04, 0.2):
        sizes = sizes_with(node=node)
        chosen = drive(sizes, 3000, 0.9, 0.0)
        spent = sum(sizes.profile.seconds(index, 1, 100) for index in chosen)
        assert spent < 1.01 * 3000 * sizes.profile.seconds(0, 1, 100)
        assert sum(index > 0 for index in chosen[100:]) < 90


def test_bad_luck_in_the_beginning_is_forgotten():
    """A drafter that is worth 15 % in the long run, whatever its first drafts brought."""
    for seed in range(20):
        chosen = drive(sizes_with(node=0.2, level=0.1), 3000, 0.5, 0.5, seed=seed)
        assert chosen[-1500:].count(0) < 300, seed


def test_a_drafter_that_is_always_right_gets_deep_trees():
    sizes = sizes_with()
    chosen = drive(sizes, 300, 0.98, 0.98)
    assert all(sizes.shapes[index].max_depth == 6 for index in chosen[20:])
    assert min(sizes.shapes[index].num_nodes for index in chosen[20:]) == 7  # more nodes than a chain promise nothing here


def test_the_best_of_all_candidates_is_taken_and_a_small_gain_is_none():
    for accepted in (0.2, 0.5, 0.8):
        sizes = sizes_with()
        drive(sizes, 200, accepted, accepted)
        decision = sizes.decision
        rates = {candidate.shape: candidate.tokens_per_second for candidate in decision.candidates}
        plain, best = rates[PLAIN], max(rate for shape, rate in rates.items() if shape is not PLAIN)
        if decision.reason == "best":
            assert rates[decision.shape] * NEAR >= best and rates[decision.shape] > STAYS * plain
        elif decision.reason == "off":
            assert best <= NEAR * MARGIN * plain


def test_a_first_look_that_misleads_is_corrected():
    """Deep trees are looked at several times before less is grown, and what is known of them follows what shallow ones bring."""
    honest = dict(promised=0.85, accepted=0.85)
    expected = [sum(0.85**d for d in range(1, shape.max_depth + 1)) for shape in SHAPES[1:]]
    for first in (0.1, 4.0):
        sizes = sizes_with()
        index = sizes.choose([[]], 100)
        sizes.observe(index, [], [first * value if SHAPES[index].max_depth >= shape.max_depth else -1.0 for value, shape in zip(expected, SHAPES[1:])], 0 if first < 1 else 6)
        chosen = drive(sizes, 300, **honest)
        assert [SHAPES[index].max_depth for index in chosen[: DEEP_LOOKS - 1]] == [6] * (DEEP_LOOKS - 1)
        assert all(SHAPES[index].max_depth == 6 for index in chosen[-50:]), first
    sizes = sizes_with()
    drive(sizes, 40, 0.9, 0.9)
    before = list(sizes._shared)
    shallow = next(i for i, shape in enumerate(SHAPES) if shape.max_depth == 1)
    for _ in range(60):
        sizes.observe(shallow, [], [0.45 if shape.max_depth == 1 else -1.0 for shape in SHAPES[1:]], 0)
    assert all(0.5 < after / value < 0.6 for value, after in zip(before, sizes._shared))


def test_no_tree_is_believed_to_bring_more_than_its_depth():
    """Whatever a shallow tree brings after one that brought next to nothing."""
    sizes = sizes_with()
    sizes.observe(len(SHAPES) - 1, [], [0.01 * (shape.num_nodes - 1) for shape in SHAPES[1:]], 0)
    shallow = next(i for i, shape in enumerate(SHAPES) if shape.max_depth == 1)
    for _ in range(3):
        sizes.observe(shallow, [], [0.9 if shape.max_depth == 1 else -1.0 for shape in SHAPES[1:]], 1)
    assert all(value <= shape.max_depth for value, shape in zip(sizes._shared, SHAPES[1:]))


def test_drafting_that_is_on_stays_on_through_what_estimates_waver_by():
    sizes, steady = sizes_with(), {}
    plain = sizes.profile.seconds(0, 1, 100)
    # What a tree of one level has to bring so that it is 3 % faster than plain decoding: too little to begin with, enough to go on.
    gain = 1.03 * sizes.profile.seconds(1, 1, 100) / plain - 1
    for last in (0, 1):
        sizes._shared, sizes._num_looks, sizes._last = [gain] * (len(SHAPES) - 1), [100] * (len(SHAPES) - 1), last
        sizes._expected = sizes._accepted = 1.0
        steady[last] = sizes.choose([[]], 100)
    assert steady == {0: 0, 1: 1}


def test_speculation_comes_back_when_the_drafter_does():
    sizes = sizes_with()
    assert drive(sizes, 300, 0.9, 0.0)[-1] == 0
    chosen = drive(sizes, 3000, 0.9, 0.9)
    assert all(index != 0 for index in chosen[-100:])


def test_a_deep_tree_is_grown_again_for_what_is_known_of_it():
    """Nothing tells that deep trees pay by now while shallow ones are grown, so the deepest is tried now and then."""
    sizes = sizes_with()
    shallow = drive(sizes, 400, 0.4, 0.4)
    assert sizes.shapes[shallow[-1]].max_depth < 6
    deep = [i for i, index in enumerate(shallow) if sizes.shapes[index].max_depth == 6 and i > 20]
    assert deep and all(REFRESH <= b - a <= REFRESH + KEPT for a, b in zip(deep, deep[1:]))
    chosen = drive(sizes, 8 * REFRESH, 0.95, 0.95)
    assert all(sizes.shapes[index].max_depth == 6 for index in chosen[-20:])


def test_large_batches_get_smaller_trees():
    """Where every row costs, as it does once a step is bound by arithmetic."""
    nodes = []
    for batch in (1, 8):
        sizes = sizes_with(node=0.25, level=0.02)
        drive(sizes, 300, 0.7, 0.7, batch=batch)
        nodes.append(sizes.decision.shape.num_nodes)
    assert nodes[0] > nodes[1]


def test_nothing_dear_is_grown_for_what_it_tells():
    """Where nodes are dear, at large batches, a look at the deepest trees would cost many plain steps."""
    for batch, promised in ((1, 0.6), (8, 0.6), (8, 0.9), (8, 0.05)):
        sizes = sizes_with(node=0.2, level=0.02)
        chosen = drive(sizes, 1500, promised, promised, batch=batch)
        plain = sizes.profile.seconds(0, batch, 100)
        rates = {sizes.shapes.index(candidate.shape): candidate.tokens_per_second for candidate in sizes.decision.candidates}
        for index in set(chosen):
            assert sizes.profile.seconds(index, batch, 100) <= AFFORDABLE * plain or rates[index] > 0.8 * rates[0], (batch, promised, index)
        spent = sum(sizes.profile.seconds(index, batch, 100) for index in chosen)
        assert spent <= 1500 * plain * 1.02 or promised > 0.5


def test_a_gain_that_comes_and_goes_does_not_start_probing_over():
    """A few steps that pay do not mean that the drafter is worth trying every 32 steps from then on."""
    sizes = sizes_with(node=0.2)
    gains, chosen = [[]], []
    for step in range(3000):
        index = sizes.choose(gains, 100)
        chosen.append(index)
        lucky = chosen.count(index) % 3 == 0
        measured = [(0.9 if lucky else 0.05) if shape.max_depth <= sizes.shapes[index].max_depth else -1.0 for shape in sizes.shapes[1:]]
        gains = [sizes.observe(index, [], measured, 0)]
    assert sum(index > 0 for index in chosen[1000:]) < 2000 / LAST_PROBE + 30


def test_a_choice_stands_for_some_steps_and_what_others_would_bring_is_looked_at_in_the_last(monkeypatch):
    target = tiny_target("llama")
    prompt, params = random_tokens(1, 9), SamplingParams(temperature=0.0, max_tokens=180)
    answer = plain_tokens(target, prompt, params)
    engine = make_engine(target, oracle_drafter(target, prompt + answer, ranks=[0, 0, 1]), tree="adaptive")
    looks = []
    monkeypatch.setattr("eagle_engine.step.measure_gains", lambda *arguments: looks.append(measure_gains(*arguments)))
    output = engine.generate([prompt], params)[0]
    assert output.token_ids == answer and sum(engine.sizes.num_steps.values()) == output.stats.steps > 20
    assert SETTLED <= len(looks) <= SETTLED + (output.stats.steps - SETTLED) / KEPT + 4 < output.stats.steps
    # Sequences that join are a reason to choose anew at once.
    sizes, own = sizes_with(), []
    drive(sizes, 60, 0.9, 0.9)
    sizes.choose([own], 100)
    first = sizes.decision
    sizes.choose([own], 100)
    assert sizes.decision is first and not sizes.wants_gains
    sizes.choose([own, []], 100)
    assert sizes.decision.batch == 2
    # So are one that takes the place of another, and many more rows.
    for gains, context in (([own], 100), ([[]], 100), ([[]], 500)):
        before = sizes.decision
        sizes.choose(gains, context)
        assert sizes.decision is not before


def test_a_long_context_counts():
    profile = CostProfile([[shape.max_depth, shape.num_nodes] for shape in SHAPES], [1, 4], [[1.0 + 0.1 * i, 2.0 + 0.2 * i] for i in range(len(SHAPES))], [0.01] * len(SHAPES), 1024)
    assert profile.seconds(0, 1, 10) == 1.0 and profile.seconds(0, 1, 164) == pytest.approx(2.0)
    assert profile.seconds(1, 2, 64) == pytest.approx(1.1 + (2.2 - 1.1) / 3)
    assert profile.seconds(0, 4, 164) == pytest.approx(2.0 + 4.0)


# The profile


def measured_with(seconds, shapes=SHAPES[:2], batches=(1, 2)) -> tuple[CostProfile, list, list]:
    """A profile where step number `call` of (batch, shape, context) takes seconds(call, batch, shape, context); the calls, and what was prepared."""
    calls, prepared, now = [], [], [0.0]

    def step(batch: int, shape: int) -> None:
        calls.append((batch, shape))
        now[0] += seconds(len(calls), batch, shape, prepared[-1][1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_engine.cost_profile.time.perf_counter", lambda: now[0])
        profile = measure_profile(lambda batch, context: prepared.append((batch, context)), step, shapes, batches, 1024)
    return profile, calls, prepared


def test_costs_are_measured_in_turns_and_the_least_disturbed_counts():
    clock = {0: 1.0, 1: 5.0}
    profile, calls, prepared = measured_with(lambda call, batch, shape, context: clock[shape] * batch * (1 + (call % 5 > 0)) + (context - 64) * 0.01)
    assert profile.base == [[1.0, 2.0], [5.0, 10.0]]
    assert profile.per_row == pytest.approx([0.01, 0.01])
    assert prepared == [(1, 64), (2, 64), (1, 64), (1, 1024)]
    assert calls[:4] == [(1, 0), (1, 1), (1, 0), (1, 1)]


def test_no_step_costs_more_than_a_larger_one_took():
    """A disturbance of all rounds of one measurement does not stand against what larger trees and batches took."""
    cost = {shape: 1.0 + 0.1 * shape.num_nodes + 0.2 * shape.max_depth for shape in SHAPES}
    disturbed = {(1, 0): 9.0, (2, 4): 3.0}
    profile, *_ = measured_with(lambda call, batch, shape, context: disturbed.get((batch, shape), 1.0) * cost[SHAPES[shape]] * (1 + 0.3 * batch), SHAPES, (1, 2, 4))
    for i, shape in enumerate(SHAPES):
        for j, batch in enumerate((1, 2, 4)):
            larger = [profile.base[k][m] for k, other in enumerate(SHAPES) for m in range(j, 3) if other.max_depth >= shape.max_depth and other.num_nodes >= shape.num_nodes]
            assert profile.base[i][j] <= min(larger)
            if (batch, i) not in disturbed:
                assert profile.base[i][j] == pytest.approx(cost[shape] * (1 + 0.3 * batch))


def test_a_profile_survives_its_file_and_a_damaged_one_is_told(tmp_path):
    profile = made_up_profile(ADAPTIVE)
    file = tmp_path / "new" / "p.json"
    assert load_profile(file) is None
    save_profile(file, profile)
    assert load_profile(file) == profile
    whole = json.loads(file.read_text())
    damaged = [dict(base=whole["base"][1:]), dict(base=[row[1:] for row in whole["base"]]), dict(base=[[0.0 for _ in row] for row in whole["base"]]), dict(base=whole["base"][:-1] + [["1"] * len(whole["batches"])])]
    damaged += [dict(per_row=[-1.0] * len(SHAPES)), dict(per_row=[float("nan")] * len(SHAPES)), dict(batches=whole["batches"][::-1]), dict(base=None)]
    for text in ("{", "null", *(json.dumps(whole | change) for change in damaged)):
        file.write_text(text)
        with pytest.warns(UserWarning, match="measured again"):
            assert load_profile(file) is None


def test_a_profile_of_other_trees_is_refused():
    target = tiny_target("llama")
    other = made_up_profile(EagleConfig(tree="adaptive", max_depth=2, num_nodes=4))
    for profile, message in ((other, "measured for other trees"), (CostProfile([[0, 1]], [], [[]], [0.0], 64), "measured for other trees"), ({"base": []}, "expected a CostProfile, got dict")):
        with pytest.raises(EagleError, match=message):
            make_engine(target, random_drafter(target), tree="adaptive", profile=profile)


def test_engines_whose_steps_cost_otherwise_do_not_share_a_profile():
    """A longer context measures what rows cost; Python runs what a recording would; a captured step is another."""
    target = tiny_target("llama")
    drafter = random_drafter(target)
    options = [{}, dict(max_model_len=90), dict(enforce_eager=True), dict(max_batch_size=3), dict(num_nodes=9), dict(graph_api=CountingGraphs())]
    files = [make_engine(target, drafter, tree="adaptive", **one).profile_file for one in options]
    assert len(set(files)) == len(files)
    assert make_engine(target, drafter, tree="adaptive", page_size=8, num_pages=90).profile_file == files[0]


def test_tuning_measures_leaves_no_trace_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), tree="adaptive", max_batch_size=2, max_depth=2, num_nodes=4)
    prompt, params = random_tokens(3, 12), SamplingParams(temperature=0.0, max_tokens=20)
    expected = plain_tokens(target, prompt, params)
    assert engine.generate([prompt], params)[0].token_ids == expected
    profile = engine.tune()
    assert all(seconds > 0 for row in profile.base for seconds in row) and profile.batches == [1, 2]
    assert engine.pages.num_held == 0 and not engine.state.active.any()
    # Dummies again: a captured step would write to pages that others have by now.
    assert (engine.state.page_table == engine.pages.num_pages).all() and (engine.state.seq_lens == 1).all()
    assert engine.generate([prompt], params)[0].token_ids == expected
    assert engine._profile(progress=False) == profile  # from its file
    engine.add_request(prompt, params)
    with pytest.raises(EagleError, match="while it answers"):
        engine.tune()
    with pytest.raises(EagleError, match="adaptive"):
        make_engine(target, random_drafter(target)).tune()


def test_shapes_of_an_adaptive_tree():
    assert SHAPES[0] is PLAIN and (SHAPES[-1].max_depth, SHAPES[-1].num_nodes) == (6, 16)
    sizes = [(shape.max_depth, shape.num_nodes) for shape in SHAPES]
    assert len(set(sizes)) == len(sizes)
    for top_k, depth, nodes in ((1, 1, 2), (1, 4, 5), (2, 3, 4), (10, 8, 60), (3, 5, 1)):
        shapes = tree_shapes(EagleConfig(tree="adaptive", top_k=top_k, max_depth=depth, num_nodes=nodes))
        assert all(shape.num_nodes <= nodes and shape.max_depth <= depth for shape in shapes)
        assert (shapes[-1].max_depth, shapes[-1].num_nodes) == ((depth, nodes) if nodes > 1 else (0, 1))
    with pytest.raises(EagleError, match="rejection"):
        EagleConfig(tree="adaptive", acceptance="rejection")
