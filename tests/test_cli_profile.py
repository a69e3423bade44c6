"""eagle tune and eagle profile: what is measured, what is attributed to which tree, what is told."""

import json
import re
import time
from collections import Counter
from functools import partial

import eagle_engine.engine_core as engine_module
import pytest
from cli_runner import one_error, pair, prompts, run  # noqa: F401  (fixtures)
from eagle_engine import EagleConfig, SamplingParams, cost_profile, scheduler, tree_sizes, tuning
from eagle_engine.cli import common, profile
from eagle_engine.cost_profile import CostProfile
from eagle_engine.engine import Engine
from eagle_engine.machine_rates import Ceilings
from eagle_engine.step_floors import Forward
from eagle_engine.tree_shape import tree_shapes
from eagle_engine.tree_sizes import MARGIN, NEAR, Decision, TreeSizes
from test_step_graphs import graphed
from tiny_engines import bigram_drafter, make_engine, made_up_profile, random_drafter, tiny_target
from tiny_targets import random_tokens

SIZES = ("--tree-top-k", 3, "--max-depth", 2, "--num-nodes", 6, "--max-model-len", 90)
RATES = Ceilings(1e10, 2e10, 1e11)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where the profiles of this test go."""
    monkeypatch.setattr(cost_profile, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def made_up(monkeypatch):
    """Neither steps nor the machine are measured: what is chosen does not hang on the machine's mood."""
    monkeypatch.setattr(Engine, "_profile", lambda self, progress: made_up_profile(self.config))
    monkeypatch.setattr(profile, "measure_ceilings", lambda *_, **__: RATES)
    monkeypatch.setattr(TreeSizes, "took", lambda *_: None)


# tune


def made_up_measurement(factor: float = 1.0):
    """In place of measure_profile; counts the calls."""

    def measure(prepare, step, shapes, batches, context_rows, progress):
        measure.calls += 1
        for batch in (*batches, context_rows):
            progress(str(batch))
        base = [[factor * 0.01 * (1 + 0.1 * shape.num_nodes) * batch for batch in batches] for shape in shapes]
        return CostProfile([[shape.max_depth, shape.num_nodes] for shape in shapes], list(batches), base, [2e-6] * len(shapes), context_rows)

    measure.calls = 0
    return measure


def test_tune_measures_once_and_anew(run, cache, monkeypatch):
    """Also where a profile is there already; the next engine takes what was measured."""
    first, second = made_up_measurement(), made_up_measurement(3.0)
    results = []
    for measure in (first, second):
        monkeypatch.setattr(tuning, "measure_profile", measure)
        status, out, _ = run("tune", "--batch-size", 2, *SIZES, "--json")
        results.append(json.loads(out))
        (file,) = (cache / "profiles").iterdir()
        assert status == 0 and measure.calls == 1 and results[-1]["file"] == str(file)
        assert json.loads(file.read_text()) == {name: results[-1][name] for name in ("shapes", "batches", "base", "per_row", "context_rows")}
    assert results[1]["base"][0][0] == pytest.approx(3 * results[0]["base"][0][0])
    assert run("generate", "Hello", "--tree", "adaptive", "--batch-size", 2, *SIZES, "--max-new-tokens", 4)[0] == 0 and second.calls == 1
    assert run("generate", "Hello", "--tree", "adaptive", "--batch-size", 3, *SIZES, "--max-new-tokens", 4)[0] == 0 and second.calls == 2


def test_tune_table(run, monkeypatch):
    monkeypatch.setattr(tuning, "measure_profile", made_up_measurement())
    status, out, err = run("tune", "--batch-size", 3, *SIZES)
    lines = out.splitlines()
    assert status == 0 and "kept in " in err and "at most 3 sequences" in err
    assert lines[2].split() == ["batch", "1", "batch", "2", "batch", "3", "1000", "rows"]
    assert lines[3].split() == ["plain", "11.00", "1.00", "22.00", "1.00", "33.00", "1.00", "2000"]
    assert lines[4].split() == "depth 1, 2 nodes 12.00 1.09 24.00 1.09 36.00 1.09 2000".split()
    shapes = tree_shapes(EagleConfig(tree="adaptive", top_k=3, max_depth=2, num_nodes=6))
    assert [line[:22].strip() for line in lines[3 : 3 + len(shapes)]] == ["plain", *(f"depth {shape.max_depth}, {shape.num_nodes} nodes" for shape in shapes[1:])]


def test_tune_measures_for_real(run):
    status, out, _ = run("tune", "--batch-size", 2, "--json", *SIZES)
    result = json.loads(out)
    assert status == 0 and all(seconds > 0 for row in result["base"] for seconds in row) and result["batches"] == [1, 2]
    for row, ratios in zip(result["base"], result["over_plain"]):
        assert ratios == [seconds / plain for seconds, plain in zip(row, result["base"][0])]


def test_tune_whose_result_cannot_be_kept_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "measure_profile", made_up_measurement())
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cost_profile, "cache_directory", lambda: tmp_path / "file")
    status, out, err = run("tune", *SIZES, "--json")
    assert status == 0 and json.loads(out)["file"] is None and err.count("eagle: warning") == 1 and "could not be kept" in err
    assert "kept in" not in run("tune", *SIZES)[2]


def test_tune_mistakes(run):
    assert "--draft none leaves nothing to measure" in one_error(run("tune", "--draft", "none"))
    assert "--tree" in one_error(run("tune", "--tree", "chain"))
    assert "nothing to tune" in one_error(run("tune", "--num-nodes", 1, "--max-model-len", 90))
    assert "max_batch_size: expected a whole number from 1" in one_error(run("tune", "--batch-size", 0))


# profile


def test_profile_json(run, prompts, made_up):
    options = ("--prompts", prompts, "--max-new-tokens", 16, "--ignore-eos")
    status, out, _ = run("profile", *options, *SIZES, "--json")
    result = json.loads(out)
    assert status == 0 and result["tokens"] == 48 and result["tokens_per_second"] == pytest.approx(48 / (result["prefill_seconds"] + result["decode_seconds"]))
    assert result["rates"] == {"read_bandwidth": 1e10, "fma_rate": 1e11, "fma_dtype": "float32"}
    # All steps are there, in both tables.
    decision = result["decision"]
    runs = {(row["max_depth"], row["num_nodes"]): row["runs"] for row in decision["trees"]}
    assert {(one["max_depth"], one["num_nodes"]): one["steps"] for one in result["shapes"]} == {size: count for size, count in runs.items() if count}
    assert sum(one["share"] for one in result["shapes"]) == pytest.approx(1.0)
    for one in result["shapes"]:
        phases = dict(one["phases"])
        step = phases.pop("step")
        assert sum(row["share"] for row in phases.values()) == pytest.approx(step["share"]) == pytest.approx(1.0)
        assert {"draft", "verify", "sample", "compact", "other"} >= phases.keys() > {"verify"}
        for row in (phases["verify"], step):
            assert row["reached"] == pytest.approx(row["floor_milliseconds"] / row["milliseconds"]) and row["bound_by"] == "bytes"
        assert phases["sample"]["floor_milliseconds"] is None
    # The choice is the one that its own table explains.
    assert decision["explanation"] == profile.REASONS[decision["reason"]] and decision["reason"] in ("best", "off")
    (chosen,) = [row for row in decision["trees"] if row["chosen"]]
    for row in decision["trees"]:
        assert row["tokens_per_second"] == pytest.approx(row["expected_tokens"] / row["milliseconds"] * 1e3)
        assert row is chosen or row["tokens_per_second"] <= NEAR * MARGIN * chosen["tokens_per_second"]
    # What was drafted, and what came of it.
    drafted = sum(count for (_, num_nodes), count in runs.items() if num_nodes > 1)
    assert 0 < sum(row["steps"] for row in result["acceptance_by_confidence"]) <= drafted  # of the steps that looked
    assert all(row["expected_from"] <= row["expected"] < row["expected_from"] + 0.5 for row in result["acceptance_by_confidence"])
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["acceptance_by_depth"]))
    assert (result["preemptions"], result["cached_tokens"]) == (0, 0) and result["prompt_tokens"] > 0


def test_profile_text_has_the_same_figures(run, prompts, made_up):
    """Those that are no times: the run is greedy, and the profile is made up."""
    options = ("--prompts", prompts, "--max-new-tokens", 16, "--ignore-eos", *SIZES)
    result = json.loads(run("profile", *options, "--json")[1])
    status, out, err = run("profile", *options)
    decision = result["decision"]
    rows = [line for line in out.splitlines() if re.match(r"[* ] (plain|depth)", line)]
    assert status == 0 and "3 prompts, at most 16 tokens each, 1 at a time" in err and len(rows) == len(decision["trees"])
    for line, row in zip(rows, decision["trees"]):
        assert line.startswith("*") == row["chosen"]
        assert line[24:].split() == [str(row["runs"]), f"{row['expected_tokens']:.2f}", f"{row['milliseconds']:.2f}", f"{row['tokens_per_second']:.1f}", f"{row['pace']:.2f}"]
    assert f": {decision['explanation']}\n" in out and f"trust {result['trust']:.2f}:" in out and f"acceptance length {result['acceptance_length']:.2f} tokens" in out
    for one in result["shapes"]:
        assert f"\n{common.shape_name(one['max_depth'], one['num_nodes']):<22}" in out and f"  {one['steps']} step" in out
    for row in result["acceptance_by_confidence"]:
        assert f"{row['steps']:>7}{row['expected']:>12.2f}{row['accepted']:>10.2f}\n" in out
    assert "read bandwidth 10.0 GB/s, float32 products 100 GFLOP/s" in out


def test_every_reason_of_a_decision_has_words():
    assert set(re.findall(r'"(\w+)"', Decision.__doc__)) == set(profile.REASONS)


def test_profile_counts_preemptions_and_prefix_hits(run, tmp_path, made_up, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "the same beginning of more than two pages " + end}) for end in "ab"))
    options = ("--prompts", file, "--raw", "--ignore-eos", "--max-new-tokens", 20, *SIZES)
    result = json.loads(run("profile", *options, "--json")[1])
    assert (result["cached_tokens"], result["prompt_tokens"], result["preemptions"]) == (32, 86, 0)
    assert "0 preemptions; 32 of 86 tokens of prompts were found" in run("profile", *options)[1]
    monkeypatch.setattr(common, "EagleConfig", partial(EagleConfig, num_pages=9))
    result = json.loads(run("profile", *options, "--json", "--batch-size", 2, "--no-prefix-caching")[1])
    assert result["cached_tokens"] == 0 and result["preemptions"] > 0 and result["tokens"] == 40


def test_profile_times_go_to_the_tree_and_the_phase_that_spent_them(run, prompts, made_up, monkeypatch):
    original = engine_module.run_step

    def slower(models, state, batch, timer, *rest):
        result = original(models, state, batch, timer, *rest)
        timer.seconds["verify"] += 100.0 * models.shape.num_nodes
        timer.seconds["sample"] += 7.0
        return result

    monkeypatch.setattr(engine_module, "run_step", slower)
    result = json.loads(run("profile", "--prompts", prompts, "--max-new-tokens", 16, "--ignore-eos", *SIZES, "--json")[1])
    assert len(result["shapes"]) > 1
    for one in result["shapes"]:
        assert one["phases"]["verify"]["milliseconds"] == pytest.approx(1e5 * one["num_nodes"], rel=1e-2)
        assert one["phases"]["sample"]["milliseconds"] == pytest.approx(7e3, rel=1e-1)


def test_profile_leaves_the_prefill_out_of_the_steps(run, prompts, made_up, monkeypatch):
    original = scheduler.prefill_piece
    monkeypatch.setattr(scheduler, "prefill_piece", lambda *arguments: time.sleep(0.2) or original(*arguments))
    result = json.loads(run("profile", "--prompts", prompts, "--max-new-tokens", 4, "--ignore-eos", *SIZES, "--json")[1])
    assert result["decode_seconds"] < 0.6 <= result["prefill_seconds"]


def test_captured_steps_are_told_apart_one_step_late():
    target = tiny_target("llama")
    config = dict(tree="adaptive", top_k=3, max_depth=2, num_nodes=6)
    prompt = random_tokens(3, 12)
    text = make_engine(target, None).generate([prompt], SamplingParams(temperature=0.0, max_tokens=30))[0].token_ids
    engine = graphed(target, bigram_drafter(target, [prompt + text], random_drafter(target)), **config)[0]
    chosen, choose = [], engine.sizes.choose
    engine.sizes.choose = lambda *arguments: chosen.append(choose(*arguments)) or chosen[-1]
    outputs, times, _ = profile.answer(engine, [prompt], SamplingParams(temperature=0.0, max_tokens=30))
    assert outputs[0].token_ids == text and chosen[0] != chosen[-1]
    sizes = [(shape.max_depth, shape.num_nodes) for shape in engine.shapes]
    assert {size: len(one.wall) for size, one in times.items()} == Counter(sizes[index] for index in chosen[:-1])
    rows = profile.report(engine, outputs, times, 0.0, RATES)["shapes"]
    assert all(one["phases"].keys() == {"graph", "other", "step"} and one["phases"]["step"]["floor_milliseconds"] > 0 for one in rows)


def test_profile_times_are_medians_and_shares_sums():
    times = profile.ShapeTimes(wall=[1.0, 2.0, 9.0], phases={"draft": [0.25, 0.5, 0.75], "verify": [0.5, 1.0, 7.5], "compact": [0.0, 0.0, 0.0]})
    times.forwards |= {"draft": 3 * [Forward(1e9, 0.0)], "verify": [Forward(1e9, 5e10), Forward(1e9, 2e10), Forward(1e9, 3e10)]}
    report = times.report((2, 5), 24.0, RATES)
    assert {name: report[name] for name in ("max_depth", "num_nodes", "steps", "share")} == {"max_depth": 2, "num_nodes": 5, "steps": 3, "share": 0.5}
    assert report["phases"] == {
        "draft": pytest.approx({"milliseconds": 500.0, "share": 0.125, "floor_milliseconds": 100.0, "reached": 0.2, "bound_by": "bytes"}),
        "verify": pytest.approx({"milliseconds": 1000.0, "share": 0.75, "floor_milliseconds": 1000 / 3, "reached": 1 / 3, "bound_by": "operations"}),
        "step": pytest.approx({"milliseconds": 2000.0, "share": 1.0, "floor_milliseconds": 1300 / 3, "reached": 1.3 / 6, "bound_by": "operations"}),
    }  # fmt: skip


def test_profile_failures_and_mistakes(run, tmp_path, made_up):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "Hi"}\n{"id": "long", "prompt": "%s"}' % ("x" * 95))
    status, out, err = run("profile", "--prompts", file, "--max-new-tokens", 5, "--ignore-eos", *SIZES, "--json")
    assert status == 2 and json.loads(out)["tokens"] == 5 and "eagle: error: prompt long: the prompt has 100 tokens" in err
    file.write_text('{"id": "long", "prompt": "%s"}' % ("x" * 95))
    status, out, err = run("profile", "--prompts", file, *SIZES)
    assert (status, out) == (2, "") and err.endswith("eagle: error: none of the prompts could be answered\n")
    assert "--draft none leaves nothing to look at" in one_error(run("profile", "--draft", "none"))
    assert "every step is plain decoding" in run("profile", "--prompts", file, "--num-nodes", 1, "--max-model-len", 90)[2]


def test_profile_of_answers_without_a_step(run, prompts, made_up):
    options = ("--prompts", prompts, "--max-new-tokens", 1, *SIZES)
    result = json.loads(run("profile", *options, "--json")[1])
    assert (result["tokens"], result["shapes"], result["decision"], result["acceptance_by_depth"]) == (3, [], None, [])
    assert "no step was run" in run("profile", *options)[1]


def test_trees_of_which_nothing_is_known_keep_their_rows():
    """Where deep trees are too dear to try, the decision compares the others; each row is that of its own tree, and the one that is grown to learn of it is marked though it promises nothing yet."""
    target = tiny_target("llama")
    engine = make_engine(target, random_drafter(target), tree="adaptive")
    known = [tree_sizes.Candidate(shape, 1.0 + index, 0.5) for index, shape in enumerate(engine.shapes) if shape.max_depth != 2]
    for chosen, reason in ((3, "best"), (len(engine.shapes) - 1, "best"), (5, "refresh")):
        engine.sizes.num_steps[chosen] = 7
        result = profile._decision(engine, Decision(engine.shapes[chosen], reason, 1, 50.0, known))
        assert [(row["max_depth"], row["num_nodes"]) for row in result["trees"]] == [(shape.max_depth, shape.num_nodes) for shape in engine.shapes]
        for index, row in enumerate(result["trees"]):
            assert row["expected_tokens"] == (None if engine.shapes[index].max_depth == 2 else 1.0 + index)
            assert row["chosen"] == (index == chosen) and row["runs"] == engine.sizes.num_steps[index]
        assert sum(line.startswith("* ") for line in profile._decision_table(result)) == 1
