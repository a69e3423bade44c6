"""eagle verify and bench."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from cli_runner import one_error, pair, plant_difference, prompts, run  # noqa: F401  (fixtures)
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.cli import baseline, bench, verify
from eagle_engine.engine import Engine
from eagle_engine.transformers_model import load_model
from tiny_pair import save_drafter
from tiny_targets import CASES, hf_logits, random_tokens, save_directory, tiny_model


# verify

TREES = {
    "dynamic": (),
    "deep": ("--tree-top-k", "3", "--max-depth", "5", "--num-nodes", "20"),
    "static": ("--tree", "static"),
    "chain": ("--tree", "chain", "--max-depth", "3"),
    "sampled": ("--temperature", "0.8", "--top-p", "0.9", "--seed", "1"),
    "batch": ("--batch-size", "3", "--temperature", "1"),
    "threads": ("--threads", "2", "--plain-threads", "1"),
    "greedy-rejection": ("--tree", "chain", "--acceptance", "rejection"),
}


@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
def test_verify_identical(run, prompts, options):
    status, out, _ = run("verify", "--prompts", prompts, "--max-new-tokens", 20, *options)
    assert (status, out) == (0, "3/3 identical\n")


def test_verify_choices_file_turns_and_json(run, prompts, tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [2], [0, 0], [0, 1]]")
    status, out, _ = run("verify", "--prompts", prompts, "--turns", "all", "--max-new-tokens", 5, "--tree", "static", "--choices", tmp_path / "tree.json", "--json")
    result = json.loads(out)
    assert status == 0
    assert {key: result[key] for key in ("identical", "total", "differences", "errors")} == {"identical": 6, "total": 6, "differences": [], "errors": []}


def test_verify_reports_a_planted_difference(run, prompts, monkeypatch):
    plant_difference(monkeypatch, at=3)
    options = ("--prompts", prompts, "--limit", 1, "--max-new-tokens", 8, "--ignore-eos")
    status, out, _ = run("verify", *options, "--json")
    (difference,) = json.loads(out)["differences"]
    assert status == 1 and json.loads(out)["identical"] == 0
    answer = json.loads(run("generate", "Say one.", "--draft", "none", "--max-new-tokens", 8, "--ignore-eos", "--json")[1])["outputs"][0]
    logits = hf_logits(tiny_model("llama"), answer["prompt_token_ids"] + answer["token_ids"][:3])[-1]
    plain, other = answer["token_ids"][3], (answer["token_ids"][3] + 1) % 80 + 3
    assert (difference["id"], difference["position"], difference["plain"], difference["speculative"]) == ("one", 3, plain, other)
    assert difference["margin"] == pytest.approx(float(logits[plain] - logits[other]), abs=1e-4)
    status, out, _ = run("verify", *options)
    assert status == 1 and out.startswith(f"prompt one, token 3: plain {plain} ") and f"logit margin {difference['margin']:.3g}\n" in out
    assert out.endswith("0/1 identical\n")


def test_verify_reports_an_answer_that_ends_early(run, prompts, monkeypatch):
    original = Engine.generate

    def cut(self, *arguments, **options):
        outputs = original(self, *arguments, **options)
        for output in outputs if self.models.drafter is not None else ():
            del output.token_ids[5:]
        return outputs

    monkeypatch.setattr(Engine, "generate", cut)
    status, out, _ = run("verify", "--prompts", prompts, "--limit", 1, "--max-new-tokens", 8, "--ignore-eos")
    assert status == 1 and ", token 5: plain " in out and "speculative ended (length)\n0/1 identical\n" in out


def test_verify_prompt_that_cannot_be_answered(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "Hi"}\n{"id": "long", "turns": ["%s", "more"]}' % ("x" * 50))
    status, out, err = run("verify", "--prompts", file, "--max-model-len", 40, "--max-new-tokens", 5, "--turns", "all")
    assert (status, out) == (2, "1/2 identical\n")
    assert "eagle: error: prompt long turn 1: the prompt has 55 tokens" in err


# bench


def test_bench_json(run, prompts):
    status, out, _ = run("bench", "--prompts", prompts, "--max-new-tokens", 9, "--ignore-eos", "--batch-size", 2, "--json")
    result = json.loads(out)
    assert status == 0 and result["different_answers"] == 0 and result["prompts"] == 3
    assert result["speedup"] == result["speculative"]["tokens_per_second"] / result["plain"]["tokens_per_second"]
    assert result["peak_memory_bytes"] > 50e6 and result["setting"].endswith("; greedy; 3 prompts, at most 9 tokens each")
    for name in ("plain", "speculative"):
        part = result[name]
        assert part["tokens"] == 27 and part["tokens_per_second"] == pytest.approx(27 / part["seconds"])
        assert sum(part["time_share"].values()) == pytest.approx(1.0, abs=1e-3)
        assert part["acceptance_length"] == pytest.approx(1 + sum(part["acceptance_by_depth"]))
    assert (result["plain"]["steps"], result["plain"]["acceptance_by_depth"]) == (24, [])


@pytest.fixture
def categories(tmp_path):
    path = tmp_path / "categories.jsonl"
    rows = [{"id": text, "category": category, "prompt": text} for text, category in (("Say one.", "a"), ("Why?", "b"), ("x = 3 + 4", "a"), ("How many are there?", "c <&>"), ("Hi", "b"))]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("batch_size", [1, 3])
def test_bench_categories_add_up_to_the_whole(run, categories, batch_size):
    options = ("--prompts", categories, "--max-new-tokens", 12, "--batch-size", batch_size, "--temperature", 1)
    status, out, _ = run("bench", *options, "--json")
    result = json.loads(out)
    parts = result["categories"]
    assert status == 0 and {name: part["prompts"] for name, part in parts.items()} == {"a": 2, "b": 2, "c <&>": 1}
    for name in ("plain", "speculative"):
        for total in ("tokens", "steps"):
            assert sum(part[name][total] for part in parts.values()) == result[name][total] > 0
        assert sum(part[name]["seconds"] for part in parts.values()) == pytest.approx(result[name]["seconds"])
        for depth, share in enumerate(result[name]["acceptance_by_depth"]):
            reached = [(part[name]["acceptance_by_depth"] + [0.0] * 9)[depth] * part[name]["steps"] for part in parts.values()]
            assert sum(reached) == pytest.approx(share * result[name]["steps"])
        for part in parts.values():
            one = part[name]
            assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
            assert one["acceptance_length"] == pytest.approx((one["tokens"] - part["prompts"]) / one["steps"])
            assert part["speedup"] == part["speculative"]["tokens_per_second"] / part["plain"]["tokens_per_second"]
    table = run("bench", *options)[1].splitlines()
    first = next(i for i, line in enumerate(table) if line.startswith("category"))
    for line, (name, part) in zip(table[first + 1 :], parts.items()):
        assert line.startswith(name) and line.split()[-1] == f"{part['speculative']['acceptance_length']:.2f}"


def test_bench_one_category_is_no_table_and_a_failed_one_is_left_out(run, prompts, tmp_path):
    assert "category" not in run("bench", "--prompts", prompts, "--max-new-tokens", 4)[1]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"category": "a", "prompt": "Hi"}\n{"category": "b", "prompt": "%s"}' % ("x" * 50))
    result = json.loads(run("bench", "--prompts", file, "--max-model-len", 40, "--max-new-tokens", 5, "--batch-size", 2, "--json")[1])
    assert list(result["categories"]) == ["a"]


def test_bench_calibration(run, categories, tmp_path):
    options = ("--prompts", categories, "--max-new-tokens", 12, "--batch-size", 2, "--temperature", 1, "--tree", "dynamic", "--tree-top-k", 4, "--max-depth", 3, "--num-nodes", 16)
    plain = json.loads(run("bench", *options, "--json")[1])
    assert "calibration" not in plain
    status, out, _ = run("bench", *options, "--calibration", "--json")
    result = json.loads(out)
    calibration = result["calibration"]
    assert status == 0 and result["different_answers"] == 0
    assert calibration["steps"] == result["speculative"]["steps"] and calibration["left_out"] == 0
    assert sum(one["drafts"] for one in calibration["bins"]) == calibration["drafts"] > calibration["steps"]
    # What was chosen at a depth are the steps that reached it; answers that end in the middle of a path count fewer of them.
    chosen = [one["accepted"] for one in calibration["by_depth"]]
    reached = [share * calibration["steps"] for share in result["speculative"]["acceptance_by_depth"]]
    assert all(fewer <= many + 1e-6 for fewer, many in zip(reached, chosen)) and sum(chosen) == calibration["accepted"] < sum(reached) + 5 * 3
    assert -1 <= calibration["correlation"] <= 1
    out = run("bench", *options, "--calibration")[1]
    assert f"all           {calibration['drafts']:>8}" in out and out.count(" to ") >= 10
    for name in ("plot.png", "plot.svg"):
        file = tmp_path / name
        status, out, err = run("bench", *options, "--plot", file, "--json")
        assert status == 0 and err.endswith(f"plot: {file}\n") and "calibration" in json.loads(out)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")
    texts = [text.text for text in ElementTree.parse(tmp_path / "plot.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert f"{calibration['drafts']} drafts: correlation {calibration['correlation']:.2f}, of the bins {calibration['binned_correlation']:.2f}" in texts
    assert {str(one["drafts"]) for one in calibration["bins"] if one["drafts"]} <= set(texts)
    assert {f"{share:.2f}" for share in result["speculative"]["acceptance_by_depth"]} <= set(texts)


def test_bench_calibration_of_a_drafter_that_knows_nothing(run, prompts, tmp_path):
    """Every confidence is 1 / vocabulary: there is no correlation to speak of."""
    draft = save_drafter(tmp_path / "draft", edit=lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    options = ("--prompts", prompts, "--max-new-tokens", 8, "--ignore-eos", "--draft", draft, "--calibration")
    status, out, _ = run("bench", *options, "--json")
    calibration = json.loads(out)["calibration"]
    assert status == 0 and calibration["correlation"] is calibration["binned_correlation"] is calibration["slope"] is None
    status, out, _ = run("bench", *options, "--plot", tmp_path / "plot.svg")
    (line,) = [line for line in out.splitlines() if line.startswith("all ")]
    assert status == 0 and line.split()[4:6] == ["n/a", "n/a"]
    assert "correlation n/a, of the bins n/a" in (tmp_path / "plot.svg").read_text()


def test_bench_calibration_mistakes(run, prompts, tmp_path, monkeypatch):
    options = ("--prompts", prompts, "--max-new-tokens", 4)
    assert "--draft none leaves nothing to measure" in one_error(run("bench", *options, "--calibration", "--draft", "none"))
    assert "use exact" in one_error(run("bench", *options, "--plot", tmp_path / "a.png", "--acceptance", "rejection", "--tree", "chain"))
    assert one_error(run("bench", *options, "--plot", tmp_path / "a.pdf")).endswith("expected a file that ends in .png or .svg")
    assert "there is no directory" in one_error(run("bench", *options, "--plot", tmp_path / "none" / "a.png"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert "extra train: pip install '.[train]'" in one_error(run("bench", *options, "--plot", tmp_path / "a.png"))
        assert run("bench", *options, "--calibration")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "captures_steps", True)
        assert "--enforce-eager" in one_error(run("bench", *options, "--calibration"))
    with monkeypatch.context() as patch:
        patch.setattr(bench, "plot_calibration", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        status, out, err = run("bench", *options, "--plot", tmp_path / "a.png", "--json")
        assert status == 2 and "calibration" in json.loads(out) and err.endswith("eagle: error: [Errno 28] No space left on device\n")


def test_bench_table_without_a_drafter(run, prompts):
    status, out, _ = run("bench", "--prompts", prompts, "--limit", 1, "--max-new-tokens", 4, "--draft", "none")
    assert status == 0 and "plain" in out and "speculative" not in out and "peak memory" in out
    status, out, _ = run("bench", "--prompts", prompts, "--limit", 1, "--max-new-tokens", 4, "--draft", "none", "--json")
    assert "speculative" not in json.loads(out)


def test_bench_transformers_baseline(run, prompts):
    status, out, err = run("bench", "--prompts", prompts, "--limit", 2, "--max-new-tokens", 6, "--threads", 1, "--baseline", "transformers")
    assert status == 0 and "\ntransformers        12" in out and "plain over transformers" in out and "speculative over plain" in out
    assert "same tokens as plain     2 of 2" in out


def test_bench_reports_failures(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "Hi"}\n{"id": "long", "prompt": "%s"}' % ("x" * 50))
    options = ("--prompts", file, "--max-model-len", 40, "--max-new-tokens", 5, "--json")
    status, out, err = run("bench", *options)
    assert status == 2 and "eagle: error: prompt long: " in err and json.loads(out)["prompts"] == 1
    file.write_text('{"id": "long", "prompt": "%s"}' % ("x" * 50))
    status, out, err = run("bench", *options)
    assert (status, out) == (2, "") and err.endswith("eagle: error: none of the prompts could be answered\n")


@pytest.mark.parametrize("case", CASES)
def test_baseline_model_is_the_target(case, tmp_path):
    """The model that transformers is given computes what the saved one does, and answers with as many tokens as asked for."""
    model = save_directory(tmp_path, case)
    loaded = load_model(open_checkpoint(tmp_path), torch.float32)
    tokens = random_tokens(3, 20)
    torch.testing.assert_close(hf_logits(loaded, tokens), hf_logits(model, tokens), rtol=1e-4, atol=1e-4)
    first = int(hf_logits(model, tokens)[-1].argmax())
    loaded.generation_config.eos_token_id = None
    answer = baseline.answer(loaded, tokens, 5)
    assert len(answer) == 5 and answer[0] == first


def test_baseline_failure_is_one_line(run, prompts, monkeypatch):
    monkeypatch.setattr(baseline.sys, "executable", "/bin/false")
    assert "transformers has ended with status 1" in one_error(run("bench", "--prompts", prompts, "--baseline", "transformers"))


def test_peak_memory_and_margin_helpers(pair):
    assert bench.peak_memory_bytes() > 10e6
    engine = Engine.from_pretrained(pair.target, "none", progress=False, max_batch_size=1)
    tokens = random_tokens(9, 40)
    logits = verify.logits_after(engine.models.target, tokens, chunk=7, page_size=4)
    torch.testing.assert_close(logits, hf_logits(tiny_model("llama"), tokens)[-1], rtol=1e-4, atol=1e-4)
