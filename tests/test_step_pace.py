"""What steps take is held against the profile: only neighbours are compared, and what slows down all of them alike changes nothing."""

import math
import random

import pytest
from eagle_engine import EagleConfig, Engine, SamplingParams
from eagle_engine.step_pace import LIMIT, StepPace
from eagle_engine.tree_sizes import COMPARE, MARGIN, STAYS, TreeSizes
from test_step_graphs import CountingGraphs
from test_tree_sizes import ADAPTIVE, SHAPES, drive
from tiny_engines import made_up_profile, oracle_drafter, plain_tokens, random_drafter, tiny_target
from tiny_targets import random_tokens


def run(pace: StepPace, dearer: list[float], speed=lambda step: 1.0, noise: float = 0.05, steps: int = 4000, seed: int = 0) -> list[float]:
    """Phases of each shape, whose steps take `dearer` times what is expected of them, on a machine of some speed; the ratios."""
    generator, index, left = random.Random(seed), 0, 0
    for step in range(steps):
        if left == 0:
            index, left = generator.choice([other for other in range(len(dearer)) if other != index]), generator.choice((1, 8, 40))
        left -= 1
        expected = generator.uniform(0.01, 0.1)
        pace.observe(index, expected * dearer[index] * speed(step) * generator.lognormvariate(0, noise), expected)
    return [pace.ratio(i) for i in range(len(dearer))]


@pytest.mark.parametrize("dearer", [[1.0, 0.9], [1.0, 1.12], [1.0, 1.0, 1.0], [1.0, 1.1, 0.95, 1.03]], ids=str)
def test_the_ratios_are_found(dearer):
    for seed in range(5):
        assert run(StepPace(len(dearer)), dearer, seed=seed) == pytest.approx(dearer, rel=0.05)


def test_what_slows_down_all_steps_changes_nothing():
    for speed in (lambda step: 3.0, lambda step: 1 + step / 1000, lambda step: 2.0 if step % 800 < 400 else 1.0):
        assert run(StepPace(3), [1.0, 1.0, 1.0], speed) == pytest.approx([1.0, 1.0, 1.0], rel=0.05)


def test_one_shape_alone_tells_nothing():
    for index in (0, 2):
        pace = StepPace(3)
        assert not pace.is_told
        for _ in range(100):
            pace.observe(index, 0.05, 0.01)
        assert pace.is_told and [pace.ratio(i) for i in range(3)] == [1.0] * 3


def test_steps_that_are_no_neighbours_are_not_compared():
    pace = StepPace(2)
    for _ in range(50):
        for index in (0, 1):
            pace.forget_last()
            pace.observe(index, 1.0 + index, 1.0)
    assert pace.ratio(1) == 1.0


def test_plain_decoding_stays_where_it_is_and_nothing_goes_too_far():
    ratios = run(StepPace(3), [1.0, 3.0, 0.2])
    assert ratios[0] == 1.0 and math.exp(-LIMIT) <= ratios[2] < 0.9 and 1.1 < ratios[1] <= math.exp(LIMIT)


def test_a_few_steps_that_were_disturbed_do_not_decide():
    pace = StepPace(2)
    for index, seconds in ((0, 1.0), (1, 50.0), (0, 1.0)):
        for _ in range(3):
            pace.observe(index, seconds, 1.0)
    assert 1 < pace.ratio(1) < 1.2


# What comes of it


def drive_timed(sizes: TreeSizes, promised: float, dearer: dict[int, float], steps: int = 1500, seed: int = 0) -> list[int]:
    """As test_tree_sizes.drive, with steps of some shapes dearer than the profile says and every promise kept."""
    generator, gains, chosen = random.Random(seed), [], []
    for _ in range(steps):
        index = sizes.choose([gains], 100)
        chosen.append(index)
        sizes.took(index, 1, 100, sizes.profile.seconds(index, 1, 100) * dearer.get(index, 1.0) * generator.lognormvariate(0, 0.02))
        depth, reached = SHAPES[index].max_depth, 0
        while reached < depth and generator.random() < promised:
            reached += 1
        gains = sizes.observe(index, gains, [sum(promised**d for d in range(1, shape.max_depth + 1)) if shape.max_depth <= depth else -1.0 for shape in SHAPES[1:]], reached)
    return chosen


def test_other_sizes_are_tried_while_they_promise_nearly_as_much():
    """Now and then, and only where steps are timed."""
    profile = made_up_profile(ADAPTIVE, node=0.15, level=0.1)
    for told in (False, True):
        sizes = TreeSizes(SHAPES, profile)
        if told:
            chosen = drive_timed(sizes, 0.5, {})
        else:
            chosen = drive(sizes, 1500, 0.5, 0.5)
        most = max(set(chosen), key=chosen.count)
        others = [i for i, index in enumerate(chosen) if index != most and SHAPES[index].max_depth < 6 and i > 100]
        assert chosen.count(most) > 1300
        if told:
            assert 10 < len(others) < 2 * 1500 / COMPARE and len({chosen[i] for i in others} - {0}) > 1 and 0 in {chosen[i] for i in others}
        else:
            assert not others


def test_a_tree_that_costs_more_than_the_profile_says_gives_way():
    sizes = TreeSizes(SHAPES, made_up_profile(ADAPTIVE, node=0.05, level=0.1))
    (first,) = {index for index in drive_timed(sizes, 0.6, {})[-20:]}
    sizes = TreeSizes(SHAPES, made_up_profile(ADAPTIVE, node=0.05, level=0.1))
    chosen = drive_timed(sizes, 0.6, {first: 1.15})
    assert first in chosen[8:12] and chosen[-300:].count(first) < 20


def test_drafting_that_costs_more_than_the_profile_says_is_given_up():
    for seed in range(5):
        found = []
        for dearer in (1.0, 1.18):  # drafting is worth 15 % by the profile
            sizes = TreeSizes(SHAPES, made_up_profile(ADAPTIVE, node=0.2, level=0.1))
            found.append(drive_timed(sizes, 0.5, dict.fromkeys(range(1, len(SHAPES)), dearer), 3000, seed)[-1000:].count(0))
        assert found[0] < 300 and found[1] > 900, found


def test_batch_sizes_have_their_own():
    sizes = TreeSizes(SHAPES, made_up_profile(ADAPTIVE))
    for step in range(400):
        index, batch = step % 2, 1 if step % 4 < 2 else 3
        sizes.took(index, batch, 100, sizes.profile.seconds(index, batch, 100) * (1.1 if index and batch == 3 else 1.0))
    assert sizes.pace(3) is sizes.pace(4) is not sizes.pace(1)
    assert sizes.pace(1).ratio(1) == 1.0 and 1.08 < sizes.pace(3).ratio(1) < 1.11


def test_steps_on_both_sides_of_another_batch_size_are_not_compared():
    """The machine may be another by then."""
    sizes = TreeSizes(SHAPES, made_up_profile(ADAPTIVE))
    for visit in range(100):
        index = visit % 2
        sizes.took(index, 1, 100, sizes.profile.seconds(index, 1, 100) * (1.2 if index else 1.0))
        sizes.took(0, 3, 100, sizes.profile.seconds(0, 3, 100))
    assert sizes.pace(1).ratio(1) == 1.0


def test_drafting_goes_on_after_a_step_that_compares():
    """On terms of drafting that is on: the step of plain decoding was no decision to go off."""
    sizes = TreeSizes(SHAPES, made_up_profile(ADAPTIVE))
    gain = (STAYS + MARGIN) / 2 * sizes.profile.seconds(1, 1, 100) / sizes.profile.seconds(0, 1, 100) - 1
    sizes._shared, sizes._num_looks, sizes._last, sizes._since_compared = [gain] * (len(SHAPES) - 1), [100] * (len(SHAPES) - 1), 1, COMPARE
    sizes._num_compared = [0] + [9] * (len(SHAPES) - 1)
    sizes._expected = sizes._accepted = 1.0
    sizes.took(1, 1, 100, 1.0)
    assert sizes.choose([[]], 100) == 0 and sizes.decision.reason == "compare"
    assert sizes.choose([[]], 100) == 1 and sizes.decision.reason == "best"


def test_steps_that_record_a_forward_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    target = tiny_target("llama")
    config = EagleConfig(tree="adaptive", max_depth=2, num_nodes=4, max_batch_size=4, max_model_len=200, page_size=4)
    engine = Engine(target, random_drafter(target), None, config, eos_token_ids=())
    recorded, steps, seen = engine._num_recorded, sum(engine.sizes.num_steps.values()), []
    monkeypatch.setattr(engine.sizes, "took", lambda *arguments: seen.append(arguments))
    engine.generate([random_tokens(i, 9) for i in range(3)], SamplingParams(temperature=0.0, max_tokens=30))
    recorded, steps = engine._num_recorded - recorded, sum(engine.sizes.num_steps.values()) - steps
    assert recorded > 0 and len(seen) == steps - recorded  # three sequences were not measured beforehand


@pytest.mark.parametrize("how", ["measured", "given", "captured"])
def test_steps_are_timed_where_the_profile_was_measured_and_the_host_waits_for_them(how, tmp_path, monkeypatch):
    """A profile that is given is taken at its word, and nobody waits for a captured step to time it."""
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    target = tiny_target("llama")
    prompt, params = random_tokens(1, 9), SamplingParams(temperature=0.0, max_tokens=40)
    answer = plain_tokens(target, prompt, params)
    config = EagleConfig(tree="adaptive", max_depth=2, num_nodes=4, max_batch_size=1, max_model_len=200, page_size=4)
    drafter = oracle_drafter(target, prompt + answer, ranks=[0, 0, 1])
    engine = Engine(target, drafter, None, config, eos_token_ids=(), graph_api=CountingGraphs() if how == "captured" else None, profile=made_up_profile(config) if how == "given" else None)
    seen = []
    monkeypatch.setattr(engine.sizes, "took", lambda *arguments: seen.append(arguments))
    output = engine.generate([prompt], params)[0]
    assert output.token_ids == answer
    if how != "measured":
        assert not seen
        return
    assert 0 < len(seen) <= output.stats.steps and all(seconds > 0 and batch == 1 and context >= 9 for _, batch, context, seconds in seen)
    assert {index for index, *_ in seen} <= {index for index, count in engine.sizes.num_steps.items() if count}
