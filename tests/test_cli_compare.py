"""eagle verify and bench."""

import json

import pytest
import torch
from cli_runner import one_error, pair, plant_difference, prompts, run  # noqa: F401  (fixtures)
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.cli import baseline, bench, verify
from eagle_engine.engine import Engine
from eagle_engine.transformers_model import load_model
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
    assert result["peak_memory_bytes"] > 50e6
    for name in ("plain", "speculative"):
        part = result[name]
        assert part["tokens"] == 27 and part["tokens_per_second"] == pytest.approx(27 / part["seconds"])
        assert sum(part["time_share"].values()) == pytest.approx(1.0, abs=1e-3)
        assert part["acceptance_length"] == pytest.approx(1 + sum(part["acceptance_by_depth"]))
    assert (result["plain"]["steps"], result["plain"]["acceptance_by_depth"]) == (24, [])


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
