"""The command `eagle` on a tiny pair: output, JSON shapes, exit status, messages."""

import io
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import eagle_engine.cli
import numpy as np
import pytest
import torch
from eagle_engine.cli import baseline, bench, generate, main, verify
from eagle_engine.engine import Engine
from eagle_engine.outputs import TextDelta
from eagle_engine.request import Request
from tiny_pair import CHARACTERS, TinyPair, make_pair, save_drafter, save_tokenizer
from tiny_targets import CASES, hf_logits, random_tokens, save_directory, tiny_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": "one", "turns": ["Say one.", "And two?"]}, {"id": "two", "prompt": "x = 3 + 4"}, {"id": "three", "turns": ["Why?", "How?", "Who?"]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def run(pair, capsys, monkeypatch, restore_num_threads):
    """run(command, *options) -> status, stdout, stderr; the tiny pair unless the options say otherwise."""

    def call(command: str, *options: object, models: bool = True, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        argv = [command, *map(str, options)]
        if models:
            argv += ["--target", str(pair.target)] if "--target" not in argv else []
            argv += ["--draft", str(pair.draft)] if "--draft" not in argv else []
        capsys.readouterr()
        status = main(argv)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return call


def one_error(result: tuple[int, str, str]) -> str:
    """The message of a user error: status 2, one line on stderr, nothing on stdout."""
    status, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("eagle: ")]
    assert (status, out, len(lines)) == (2, "", 1), (status, out, err)
    assert lines[0].startswith("eagle: error: ") and err.endswith(lines[0] + "\n")
    return lines[0].removeprefix("eagle: error: ")


def plant_difference(monkeypatch, at: int) -> None:
    """Speculative answers get another token at one place."""
    original = Request.output

    def output(self):
        result = original(self)
        if plant_difference.speculative and len(result.token_ids) > at:
            result.token_ids[at] = (result.token_ids[at] + 1) % 80 + 3
        return result

    generate_original = Engine.generate

    def marked_generate(self, *arguments, **options):
        plant_difference.speculative = self.models.drafter is not None
        return generate_original(self, *arguments, **options)

    monkeypatch.setattr(Request, "output", output)
    monkeypatch.setattr(Engine, "generate", marked_generate)


# generate


def test_generate_streams_one_answer(run):
    options = ("Hello", "--max-new-tokens", 12, "--ignore-eos")
    status, out, err = run("generate", *options)
    _, plain, _ = run("generate", *options, "--draft", "none")
    _, as_json, _ = run("generate", *options, "--json")
    (output,) = json.loads(as_json)["outputs"]
    assert status == 0 and out == plain == output["text"] + "\n"
    assert err.startswith("[12 tokens, ") and f"acceptance length {output['stats']['acceptance_length']:.2f}]" in err
    assert output["finish_reason"] == "length" and len(output["token_ids"]) == 12 and output["prompt"] == "Hello"


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_generate_counts_steps_of_short_answers(run, max_tokens):
    status, _, err = run("generate", "Hello", "--max-new-tokens", max_tokens, "--ignore-eos")
    assert status == 0 and err.startswith(f"[{max_tokens} tokens, ")
    assert ("acceptance length 1.00" in err) == (max_tokens == 2)


def test_generate_prompts_from_everywhere(run, prompts):
    options = ("--max-new-tokens", 4, "--ignore-eos", "--json")
    answers = json.loads(run("generate", "Say one.", "x = 3 + 4", *options)[1])["outputs"]
    assert [output["id"] for output in answers] == ["1", "2"]
    from_file = json.loads(run("generate", "--prompts", prompts, "--limit", 2, *options, "--batch-size", 2)[1])["outputs"]
    assert [output["id"] for output in from_file] == ["one", "two"]
    assert [output["token_ids"] for output in answers] == [output["token_ids"] for output in from_file]
    (from_stdin,) = json.loads(run("generate", *options, stdin="Say one.\n")[1])["outputs"]
    assert from_stdin["token_ids"] == answers[0]["token_ids"]
    text = run("generate", "--prompts", prompts, "--max-new-tokens", 4)[1]
    assert [line for line in text.splitlines() if line.startswith("===")] == ["=== one", "=== two", "=== three"]


def test_generate_chat_template_system_and_raw(run):
    def prompt_ids(*options):
        return json.loads(run("generate", "ab", "--max-new-tokens", 1, "--json", *options)[1])["outputs"][0]["prompt_token_ids"]

    ids = {character: i + 3 for i, character in enumerate(CHARACTERS)}
    assert prompt_ids("--raw") == [ids[c] for c in "ab"]
    assert prompt_ids() == [ids[c] for c in "u:ab\na:"]
    assert prompt_ids("--system", "s") == [ids[c] for c in "s:s\nu:ab\na:"]


def test_generate_goes_on_after_a_prompt_that_fails(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"id": name, "prompt": text}) for name, text in (("a", "Hi"), ("long", "x" * 50), ("c", "Yo"))))
    options = ("--prompts", file, "--max-model-len", 40, "--max-new-tokens", 5, "--ignore-eos")
    status, out, err = run("generate", *options, "--json")
    outputs = json.loads(out)["outputs"]
    assert status == 1 and [len(output["token_ids"]) for output in outputs] == [5, 0, 5]
    assert outputs[1]["finish_reason"] == "error" and "no room" in outputs[1]["error"]
    assert "eagle: error: prompt long: the prompt has 55 tokens" in err
    assert run("generate", *options)[0] == 1
    assert "no room" in one_error(run("generate", "x" * 50, "--max-model-len", 40)).strip()


def test_generate_stop_strings_and_tokens(run):
    whole = json.loads(run("generate", "Hello", "--max-new-tokens", 20, "--ignore-eos", "--json")[1])["outputs"][0]
    token, text = whole["token_ids"][6], whole["text"]
    stopped = json.loads(run("generate", "Hello", "--max-new-tokens", 20, "--ignore-eos", "--stop", text[3:5], "--stop", "never", "--json")[1])["outputs"][0]
    assert stopped["text"] == text[: text.index(text[3:5])] and stopped["stop_reason"] == text[3:5]
    stopped = json.loads(run("generate", "Hello", "--max-new-tokens", 20, "--ignore-eos", "--stop-token-id", token, "--json")[1])["outputs"][0]
    assert stopped["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token) + 1] and stopped["stop_reason"] == token


# chat


def test_chat_remembers_and_resets(run):
    options = ("--max-new-tokens", 6, "--ignore-eos", "--json")
    status, out, err = run("chat", *options, stdin="Hi\nWhy?\n\n/reset\nWhy?\n/help\n/exit\nnever\n")
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(answers) == 3 and err == "commands are /reset and /exit\n"
    assert set(answers[0]) == {"text", "token_ids", "finish_reason", "tokens_per_second"}
    fresh = json.loads(run("chat", *options, stdin="Why?")[1])
    assert answers[2]["token_ids"] == fresh["token_ids"] != answers[1]["token_ids"]
    assert run("chat", "--max-new-tokens", 6, "--ignore-eos", stdin="Why?\n")[1] == fresh["text"] + "\n"


def test_chat_survives_ctrl_c_and_a_full_context(run, monkeypatch):
    calls = []

    def stream(self, prompt, params):
        calls.append(prompt)
        yield TextDelta("half", [5, 6], None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "stream", stream)
        status, out, err = run("chat", stdin="Hi\nYo\n")
    assert (status, out, err) == (0, "half\nhalf\n", "[stopped]\n[stopped]\n")
    assert len(calls[1]) > len(calls[0])  # the half answer is part of the conversation
    status, out, err = run("chat", "--max-model-len", 30, "--ignore-eos", "--max-new-tokens", 5, "--json", stdin=f"Hi\n{'x' * 30}\nYo\n")
    assert status == 0 and len(out.splitlines()) == 2
    assert "eagle: error: the prompt has" in err and err.endswith("; /reset starts over\n")


def test_chat_needs_a_template(run, tmp_path):
    save_directory(tmp_path, "llama")
    save_tokenizer(tmp_path, template=None)
    assert "no chat template" in one_error(run("chat", "--target", tmp_path))
    assert run("generate", "Hi", "--target", tmp_path, "--max-new-tokens", 2)[0] == 0
    assert "--system" in one_error(run("generate", "Hi", "--target", tmp_path, "--system", "s"))


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
    assert (status, out) == (1, "1/2 identical\n")
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
    assert status == 1 and "eagle: error: prompt long: " in err and json.loads(out)["prompts"] == 1
    file.write_text('{"id": "long", "prompt": "%s"}' % ("x" * 50))
    status, out, err = run("bench", *options)
    assert (status, out) == (2, "") and err.endswith("eagle: error: none of the prompts could be answered\n")


@pytest.mark.parametrize("case", CASES)
def test_baseline_model_is_the_target(case, tmp_path):
    """The model that transformers is given computes what the saved one does, and answers with as many tokens as asked for."""
    model = save_directory(tmp_path, case)
    loaded = baseline.load_model(tmp_path, torch.float32)
    tokens = random_tokens(3, 20)
    torch.testing.assert_close(hf_logits(loaded, tokens), hf_logits(model, tokens), rtol=1e-4, atol=1e-4)
    first = int(hf_logits(model, tokens)[-1].argmax())
    loaded.generation_config.eos_token_id = None
    answer = baseline.answer(loaded, tokens, 5)
    assert len(answer) == 5 and answer[0] == first


def test_baseline_failure_is_one_line(run, prompts, monkeypatch):
    monkeypatch.setattr(baseline.sys, "executable", "/bin/false")
    assert "transformers has ended with status 1" in one_error(run("bench", "--prompts", prompts, "--baseline", "transformers"))


# inspect


def test_inspect_pair(run, pair):
    np.save(pair.draft / "token_ranking.npy", np.arange(20, dtype=np.uint16))
    try:
        status, out, _ = run("inspect", "--json")
    finally:
        (pair.draft / "token_ranking.npy").unlink()
    result = json.loads(out)
    assert status == 0 and result["fits"] is True and result["reason"] is None
    assert {key: result["target"][key] for key in ("architecture", "hidden_size", "num_layers", "vocab_size", "dtype")} == {
        "architecture": "llama", "hidden_size": 48, "num_layers": 2, "vocab_size": 83, "dtype": "float32",
    }  # fmt: skip
    assert result["target"]["tokenizer"] == {"vocab_size": 83, "chat_template": True, "end_tokens": [{"id": 2, "text": "</s>"}]}
    assert result["target"]["parameters"] == sum(parameter.numel() for parameter in tiny_model("llama").parameters())
    draft = result["draft"]
    assert (draft["version"], draft["fc_bias"], draft["qkv_bias"], draft["embeddings"], draft["rope_theta"], draft["ranked_tokens"]) == ("EAGLE-1/2", True, False, "target's", 10000.0, 20)
    status, out, _ = run("inspect")
    assert status == 0 and out.endswith("the drafter fits the target\n") and "rope theta" in out


@pytest.mark.parametrize("case", CASES)
def test_inspect_every_family(run, tmp_path, case):
    save_directory(tmp_path, case)
    status, out, _ = run("inspect", "--target", tmp_path, "--draft", "auto")
    assert status == 0 and "  architecture             " + CASES[case][0].lower() in out and "not usable" in out


def test_inspect_pair_that_does_not_fit(run, tmp_path):
    narrow = save_drafter(tmp_path / "narrow", hidden_size=32, vocab_size=100)
    status, out, err = run("inspect", "--draft", narrow)
    assert status == 1 and err == ""
    assert "the drafter does not fit the target: hidden_size of the drafter is 32, of the target 48" in out and "vocab_size of the drafter is 100" in out
    result = json.loads(run("inspect", "--draft", narrow, "--json")[1])
    assert result["fits"] is False and "made for another target" in result["reason"]
    status, out, _ = run("inspect", "--draft", narrow, "--target", "none")
    assert status == 0 and not out.startswith("target")
    assert "nothing to inspect" in one_error(run("inspect", "--draft", "none", "--target", "none"))


def test_inspect_own_embedding_and_biases(run, tmp_path):
    path = save_drafter(tmp_path / "d", qkv_bias=True, bias=False, rope_theta=5e5, edit=lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(83, 48)}))
    draft = json.loads(run("inspect", "--draft", path, "--json")[1])["draft"]
    assert (draft["fc_bias"], draft["qkv_bias"], draft["embeddings"], draft["head"], draft["rope_theta"]) == (False, True, "own", "target's", 5e5)


# fetch and demo


def test_fetch(run, monkeypatch, tmp_path):
    (tmp_path / "weights").write_bytes(b"1234")
    monkeypatch.setattr("eagle_engine.demo.fetch_demo", lambda progress=True: tmp_path / "weights")
    assert run("fetch", models=False) == (0, f"{tmp_path / 'weights'}\n", "")
    assert json.loads(run("fetch", "--json", models=False)[1]) == {"path": str(tmp_path / "weights"), "bytes": 4}


def test_demo(run, monkeypatch):
    options = ("Say one.", "--max-new-tokens", 8, "--ignore-eos")
    status, out, _ = run("demo", *options)
    assert status == 0 and "same tokens           yes\n" in out and "acceptance length" in out and out.count("tokens/s") == 2
    result = json.loads(run("demo", *options, "--json")[1])
    assert result["same_tokens"] is True and result["plain"]["token_ids"] == result["speculative"]["token_ids"]
    plant_difference(monkeypatch, at=2)
    status, out, _ = run("demo", *options)
    assert status == 1 and "same tokens           NO" in out


# mistakes

USER_ERRORS = {
    "command": (("frobnicate",), "invalid choice: 'frobnicate'"),
    "option": (("generate", "hi", "--frob"), "unrecognized arguments: --frob"),
    "abbreviation": (("generate", "hi", "--temp", "1"), "unrecognized arguments: --temp 1"),
    "number": (("generate", "hi", "--top-p", "many"), "--top-p: invalid float value: 'many'"),
    "temperature": (("generate", "hi", "--temperature", "-1"), "temperature: expected"),
    "nan": (("generate", "hi", "--temperature", "nan"), "temperature: expected"),
    "max-new-tokens": (("generate", "hi", "--max-new-tokens", "0"), "max_tokens: expected"),
    "threads": (("generate", "hi", "--threads", "0"), "--threads: expected"),
    "tree": (("generate", "hi", "--num-nodes", "500"), "num_nodes: expected"),
    "tree-too-small": (("generate", "hi", "--tree-top-k", "2", "--max-depth", "1"), "num_nodes 8 is more than"),
    "rejection": (("generate", "hi", "--acceptance", "rejection"), "use tree 'chain' or 'static'"),
    "choices": (("generate", "hi", "--choices", "/nowhere.json"), "--choices /nowhere.json: No such file"),
    "draft-vocab": (("generate", "hi", "--draft-vocab", "10"), "token_ranking.npy does not exist"),
    "target": (("generate", "hi", "--target", "/nowhere"), "/nowhere: no such file or directory"),
    "draft": (("generate", "hi", "--draft", "/nowhere"), "/nowhere: no such drafter directory"),
    "no-draft": (("generate", "hi", "--draft", "auto"), "no drafter is known for this target"),
    "empty": (("generate", " "), "the prompt is empty"),
    "surrogate": (("generate", "\udcff"), "not valid Unicode"),
    "empty-stdin": (("generate",), "the prompt is empty"),
    "two-sources": (("generate", "hi", "--suite", "gsm8k"), "not both"),
    "stop": (("generate", "hi", "--stop", ""), "stop: expected non-empty"),
    "prompts": (("verify", "--prompts", "/nowhere"), "no such prompt file"),
    "no-prompts": (("verify",), "--prompts --suite is required"),
    "both-prompts": (("verify", "--prompts", "x", "--suite", "gsm8k"), "not allowed with"),
    "suite": (("verify", "--suite", "nothing"), "invalid choice: 'nothing'"),
    "limit": (("verify", "--suite", "gsm8k", "--limit", "0"), "limit must be at least 1"),
    "verify-none": (("verify", "--suite", "gsm8k", "--draft", "none"), "nothing to compare"),
    "verify-rejection": (("verify", "--suite", "gsm8k", "--tree", "chain", "--acceptance", "rejection", "--temperature", "1"), "not its tokens"),
    "turns-raw": (("verify", "--suite", "mt_bench", "--limit", "1", "--turns", "all", "--raw", "--max-new-tokens", "1", "--target", "@window"), "several turns need a chat template"),
    "baseline-batch": (("bench", "--baseline", "transformers", "--batch-size", "2"), "one prompt at a time"),
    "demo-none": (("demo", "--draft", "none"), "nothing to compare"),
}


@pytest.mark.parametrize(("argv", "message"), USER_ERRORS.values(), ids=USER_ERRORS)
def test_user_error_is_one_line(run, tmp_path, argv, message):
    if "@window" in argv:
        save_directory(tmp_path, "llama", max_position_embeddings=512)
        save_tokenizer(tmp_path)
        argv = tuple(str(tmp_path) if item == "@window" else item for item in argv)
    command, *options = argv
    assert message in one_error(run(command, *options, "--json", models=command != "frobnicate"))


def broken(path: Path, what: str) -> None:
    """Damage a copy of a target or drafter."""
    weights = path / "model.safetensors"
    config = json.loads((path / "config.json").read_text())
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "garbage":
        weights.write_bytes(b"not a checkpoint")
    elif what == "json":
        (path / "config.json").write_text("{")
    elif what == "unknown":
        (path / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    elif what == "mis-shaped":
        (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 99}))
    elif what == "eagle-3":
        (path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 40}))


@pytest.mark.parametrize("command", ["inspect", "generate"])
@pytest.mark.parametrize(
    ("kind", "what", "message"),
    [
        ("target", "truncated", "not a complete safetensors file"),
        ("target", "garbage", "not a complete safetensors file"),
        ("target", "json", "not readable as JSON"),
        ("target", "unknown", "architecture 'MambaForCausalLM' is not supported"),
        ("target", "mis-shaped", "expected shape [99, 48], got [72, 48]"),
        ("draft", "truncated", "not a complete safetensors file"),
        ("draft", "mis-shaped", "expected shape [99, 48], got [40, 48]"),
        ("draft", "eagle-3", "this is an EAGLE-3 drafter"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_broken_files_are_named(run, tmp_path, command, kind, what, message):
    tiny = make_pair(tmp_path)
    path = getattr(tiny, kind)
    broken(path, what)
    options = ("--target", tiny.target, "--draft", tiny.draft)
    error = one_error(run(command, *(("hi",) if command == "generate" else ()), *options))
    assert message in error and str(path) in error


def test_interrupt_memory_and_warnings(run, monkeypatch):
    def fail(error):
        def run_command(args):
            raise error

        return run_command

    monkeypatch.setattr(generate, "run", fail(KeyboardInterrupt()))
    assert run("generate", "hi") == (130, "", "eagle: interrupted\n")
    monkeypatch.setattr(generate, "run", fail(MemoryError()))
    assert one_error(run("generate", "hi")) == "MemoryError"
    monkeypatch.setattr(generate, "run", fail(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore")))
    assert one_error(run("generate", "hi")).startswith("not enough memory")
    monkeypatch.setattr(generate, "run", fail(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run("generate", "hi")
    monkeypatch.setattr(generate, "run", lambda args: warnings.warn("something odd", stacklevel=1) or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("generate", "hi") == (0, "", "eagle: warning: something odd\n")


# as a process of its own


def environment() -> dict[str, str]:
    root = str(Path(eagle_engine.cli.__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])), "OMP_NUM_THREADS": "1"}


def test_help_and_mistakes_do_not_wait_for_torch():
    code = (
        "import sys; from eagle_engine.cli import main\n"
        "for argv in (['--help'], ['bench', '--help'], ['--version']):\n"
        "    try: main(argv)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert main(['generate', '--temperature', 'hot']) == 2\n"
        "assert main(['generate', '--prompts', '/nowhere']) == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "verify" in result.stdout and len(result.stderr.splitlines()) == 2


def test_reader_that_goes_away(pair):
    command = [sys.executable, "-m", "eagle_engine.cli", "inspect", "--target", "none", "--draft", str(pair.draft)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(), err) == (141, "")


def test_ctrl_c_from_outside(pair):
    command = [sys.executable, "-m", "eagle_engine.cli", "chat", "--target", str(pair.target), "--draft", str(pair.draft), "--json", "--max-new-tokens", "2"]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdin.write("Hi\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["finish_reason"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "eagle: interrupted\n")


def test_peak_memory_and_margin_helpers(pair):
    assert bench.peak_memory_bytes() > 10e6
    engine = Engine.from_pretrained(pair.target, "none", progress=False, max_batch_size=1)
    tokens = random_tokens(9, 40)
    logits = verify.logits_after(engine.models.target, tokens, chunk=7, page_size=4)
    torch.testing.assert_close(logits, hf_logits(tiny_model("llama"), tokens)[-1], rtol=1e-4, atol=1e-4)
