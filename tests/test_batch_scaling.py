"""bench/batch_scaling.py: what it measures, compares and tells."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from cli_runner import pair, plant_difference, prompts  # noqa: F401  (fixtures)
from eagle_engine import SamplingParams
from eagle_engine.engine import Engine
from tiny_engines import DRAFTERS, made_up_profile, make_engine, random_drafter, tiny_target
from tiny_targets import random_tokens

BENCH = Path(__file__).parent.parent / "bench"
OPTIONS = ("--batch-sizes", "2", "1", "--rounds", "4", "--queue", "1", "--least", "1", "--max-new-tokens", "10", "--max-model-len", "60")


@pytest.fixture
def batch_scaling(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("batch_scaling")


@pytest.fixture
def program(batch_scaling, pair, prompts, capsys, monkeypatch, restore_num_threads):
    """program(*options) -> status, stdout; the tiny pair, on a made-up profile."""
    monkeypatch.setattr(Engine, "_profile", lambda self, progress: made_up_profile(self.config))

    def call(*options: object) -> tuple[int, str]:
        arguments = ["--target", pair.target, "--draft", pair.draft, "--prompts", prompts, "--threads", 1, *OPTIONS, *options]
        monkeypatch.setattr(sys, "argv", ["batch_scaling.py", *map(str, arguments)])
        capsys.readouterr()
        return batch_scaling.main(), capsys.readouterr().out

    return call


def test_every_mode_answers_every_prompt(program, tmp_path):
    file = tmp_path / "result.json"
    status, out = program("--json", "--output", file)
    result = json.loads(out)
    assert status == 0 and json.loads(file.read_text()) == result and result["differences"] == []
    assert [row["batch"] for row in result["batches"]] == [1, 2]
    for row in result["batches"]:
        modes = row["modes"]
        assert list(modes) == ["plain", "fixed", "adaptive"] and all(len(one["seconds"]) == 4 for one in modes.values())
        plain = modes["plain"]
        assert (plain["ratio"], plain["decode_ratio"], plain["acceptance_length"], plain["shapes"]) == (1.0, 1.0, 1.0, {"plain": 1.0})
        assert modes["fixed"]["shapes"] == {"depth 2, 5 nodes": 1.0} and 1 <= modes["fixed"]["acceptance_length"] <= 3
        assert sum(modes["adaptive"]["shapes"].values()) == pytest.approx(1.0) and "plain" in modes["adaptive"]["shapes"]
        best = "fixed" if modes["fixed"]["ratio"] > 1 else "plain"
        each = sorted(theirs / ours for theirs, ours in zip(modes[best]["seconds"], modes["adaptive"]["seconds"]))
        assert row["best"] == best and row["adaptive_over_best"] == pytest.approx((each[1] + each[2]) / 2)
        assert row["middle_half"] == pytest.approx([each[0] + 0.75 * (each[1] - each[0]), each[2] + 0.25 * (each[3] - each[2])])
    assert result["least_adaptive_over_best"] == min(row["adaptive_over_best"] for row in result["batches"])


def test_modes_take_turns_on_the_same_prompts(program, monkeypatch):
    """Rounds of two go through the three prompts, from the first again after the last; whoever was first is last next time."""
    calls, generate = [], Engine.generate

    def watched(self, prompts, params):
        if params.max_tokens == 10:  # no warm-up
            kind = "plain" if self.models.drafter is None else "fixed" if self.sizes is None else "adaptive"
            calls.append((kind, len(prompts), tuple(map(tuple, prompts))))
            assert not self.config.enable_prefix_caching and self.config.max_batch_size == len(prompts) and params.ignore_eos and params.temperature == 0
        return generate(self, prompts, params)

    monkeypatch.setattr(Engine, "generate", watched)
    assert program()[0] == 0
    assert [kind for kind, count, _ in calls if count == 2] == ["plain", "fixed", "adaptive", "fixed", "adaptive", "plain", "adaptive", "plain", "fixed", "plain", "fixed", "adaptive"]
    rounds = [given for _, count, given in calls if count == 2]
    assert all(len(set(rounds[i : i + 3])) == 1 for i in range(0, 12, 3))
    a, b, c = (given[0] for _, count, given in calls[:9:3])
    assert rounds[::3] == [(a, b), (c, a), (b, c), (a, b)] and len({a, b, c}) == 3


def test_rounds_have_the_least_number_of_prompts(program, monkeypatch):
    counts, generate = [], Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, prompts, params: counts.append((self.config.max_batch_size, len(prompts))) or generate(self, prompts, params))
    assert program("--least", 3, "--queue", 2, "--rounds", 1)[0] == 0
    assert counts == 3 * [(1, 1)] + 3 * [(1, 3)] + 3 * [(2, 2)] + 3 * [(2, 4)]


def test_a_difference_is_reported(program, monkeypatch):
    plant_difference(monkeypatch, at=3)
    status, out = program("--json", "--limit", 1, "--batch-sizes", 1, "--rounds", 2)
    differences = json.loads(out)["differences"]
    assert status == 1 and differences == [{"batch": 1, "round": number, "mode": mode, "prompt": "one", "token": 3} for number in (0, 1) for mode in ("fixed", "adaptive")]
    status, out = program("--limit", 1, "--batch-sizes", 1, "--rounds", 1)
    assert status == 1 and "2 answers differ from plain decoding\n  batch 1, round 0, fixed, prompt one: token 3 is the first\n" in out


def test_table_and_plot(program, tmp_path):
    status, out = program("--plot", tmp_path / "plot.png")
    assert status == 0 and (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")
    lines = out.splitlines()
    assert [tuple(line.split()[:2]) for line in lines[3:9]] == [(batch, mode) for batch in "12" for mode in ("plain", "fixed", "adaptive")]
    assert lines[-2].startswith("adaptive over the best of plain and fixed, likewise, and the middle half of the rounds: batch 1: ") and lines[-1] == "every token is that of plain decoding"
    assert program("--plot", tmp_path / "plot.svg")[0] == 0 and ">adaptive</text>" in (tmp_path / "plot.svg").read_text()


def test_steps_by_tree_are_those_of_the_run(batch_scaling):
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), tree="adaptive", top_k=3, max_depth=2, num_nodes=6)
    params, into = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), batch_scaling.Measured()
    for seed in (1, 2):
        batch_scaling.run_once(engine, [random_tokens(seed, 9)], params, into)
    assert sum(into.shapes.values()) == sum(engine.sizes.num_steps.values()) == into.steps
    assert (into.tokens, into.answers, len(into.seconds), len(into.prefill)) == (40, 2, 2, 2) and all(whole > prefill > 0 for whole, prefill in zip(into.seconds, into.prefill))


def test_useless_drafter(program, batch_scaling, monkeypatch):
    made, useless = [], batch_scaling.useless
    monkeypatch.setattr(batch_scaling, "useless", lambda *arguments: made.append(useless(*arguments)) or made[-1])
    engines, make = [], batch_scaling.make_engines
    monkeypatch.setattr(batch_scaling, "make_engines", lambda *arguments: engines.append(make(*arguments)) or engines[-1])
    status, out = program("--json", "--useless-drafter")
    result = json.loads(out)
    assert engines[0][0]["adaptive"].models.drafter is made[0]
    assert status == 0 and result["differences"] == [] and result["setting"]["models"].endswith("random weights")
    for row in result["batches"]:
        assert list(row["modes"]) == ["plain", "adaptive"] and row["adaptive_over_best"] == row["modes"]["adaptive"]["ratio"]
    assert "adaptive over the best of plain, likewise, and the middle half of the rounds: batch 1: " in program("--useless-drafter")[1]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_useless_drafter_has_the_shape_of_the_real_one_and_none_of_its_weights(kind, batch_scaling):
    target = tiny_target("llama", num_hidden_layers=7)
    real = DRAFTERS[kind](target)
    other = batch_scaling.useless(real, target)
    assert other.config == real.config and other.vocab_size == real.vocab_size
    assert other.draft_to_target is None if real.draft_to_target is None else torch.equal(other.draft_to_target, real.draft_to_target)
    features = torch.randn(2, real.config.layer.hidden_size)
    names = [next(iter(drafter._weights.values()))[0].data for drafter in (real, other)]
    assert other.logits(features).shape == real.logits(features).shape and not torch.equal(*names)


def test_figures_are_medians_of_rounds(batch_scaling):
    measured = batch_scaling.Measured
    plain = measured(tokens=60, answers=6, steps=54, seconds=[1.0, 2.0, 4.0], prefill=[0.5, 0.5, 0.5], shapes=Counter(plain=1))
    fixed = measured(tokens=60, answers=6, steps=27, seconds=[0.5, 1.6, 8.0], prefill=[0.25, 0.5, 0.5], shapes=Counter({"depth 2, 5 nodes": 27}))
    adaptive = measured(tokens=60, answers=6, steps=36, seconds=[0.5, 1.0, 16.0], prefill=[0.0, 0.5, 1.0], shapes=Counter({"plain": 9, "depth 2, 5 nodes": 27}))
    result = batch_scaling.report({4: {"plain": plain, "fixed": fixed, "adaptive": adaptive}}, [])
    (row,) = result["batches"]
    assert row["modes"]["fixed"]["tokens_per_second"] == 12.5 and row["modes"]["fixed"]["ratio"] == 1.25 and row["modes"]["fixed"]["acceptance_length"] == 2.0
    assert row["modes"]["adaptive"]["ratio"] == 2.0 and row["modes"]["adaptive"]["decode_ratio"] == 1.0
    assert row["modes"]["adaptive"]["decode_tokens_per_second"] == pytest.approx(18 / 0.5) and row["modes"]["adaptive"]["shapes"] == {"depth 2, 5 nodes": 0.75, "plain": 0.25}
    # The best of the others by its median; then round by round: 0.5 / 0.5, 1.6 / 1.0, 8.0 / 16.0.
    assert row["best"] == "fixed" and row["adaptive_over_best"] == result["least_adaptive_over_best"] == 1.0 and row["middle_half"] == pytest.approx([0.75, 1.3])
    assert "batch 4: 1.000 (0.750 to 1.300); least 1.000" in batch_scaling.table(result)
    one = {mode: measured(tokens=2, answers=1, steps=1, seconds=[seconds], prefill=[0.0], shapes=Counter(plain=1)) for mode, seconds in (("plain", 2.0), ("adaptive", 4.0))}
    assert batch_scaling.report({1: one}, [])["batches"][0]["middle_half"] == [0.5, 0.5]


def test_mistakes(program, tmp_path, capsys):
    for options, message in (
        (("--least", 0), "--rounds, --queue and --least must be at least 1"),
        (("--draft", "none"), "--draft none leaves nothing to compare"),
        (("--output", "result.txt"), "--output result.txt: expected a file that ends in .json"),
        (("--plot", tmp_path / "none" / "plot.png"), "there is no directory"),
        (("--max-model-len", 20), "--max-model-len 20 would cut answers: the longest prompt has 14 tokens, and answers have 10"),
    ):
        with pytest.raises(SystemExit) as stopped:
            program(*options)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
