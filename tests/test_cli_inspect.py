"""eagle inspect, mistakes and broken files."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runner import one_error, pair, run  # noqa: F401  (fixtures)
from eagle_engine.cli import generate
from drafter_files import write_drafter
from tiny_engines import random_tensors
from tiny_pair import DRAFTER_CONFIG, make_pair, save_drafter, save_tokenizer
from tiny_targets import CASES, save_directory, tiny_model


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


def save_eagle3(directory: Path, **options) -> Path:
    raw = DRAFTER_CONFIG | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=40) | options
    parsed = {key: value for key, value in raw.items() if key != IDS}
    return write_drafter(directory, raw, random_tensors(parsed))


IDS = "eagle_aux_hidden_state_layer_ids"


def test_inspect_eagle3(run, tmp_path):
    """Version, flags, vocabulary and captured layers; with the target of two layers only those that are listed fit."""
    save_directory(tmp_path / "deep", "llama", num_hidden_layers=8)
    save_tokenizer(tmp_path / "deep")
    plain = save_eagle3(tmp_path / "plain")
    flagged = save_eagle3(tmp_path / "flagged", fc_norm=True, norm_output=True, **{IDS: [1, 3, 5]})

    def inspect(*options) -> dict:
        return json.loads(run("inspect", "--json", *options)[1])

    result = inspect("--target", tmp_path / "deep", "--draft", plain)
    draft = result["draft"]
    assert result["fits"] is True
    assert (draft["version"], draft["draft_vocab_size"], draft["target_hidden_size"], draft["flags"], draft["embeddings"], draft["head"]) == ("EAGLE-3", 40, 48, [], "target's", "own")
    assert draft["captured_states"] == "inputs of layers 2, 4, 5" and "fc_bias" not in draft
    assert inspect("--target", "none", "--draft", plain)["draft"]["captured_states"] == "inputs of layers 2, N // 2 and N - 3 of N"
    shallow = inspect("--draft", plain)
    assert shallow["fits"] is False and "need a target of 7 layers or more, this one has 2" in shallow["reason"]
    for convention, layers in (("input", "1, 3, 5"), ("output", "2, 4, 6")):
        draft = inspect("--target", tmp_path / "deep", "--draft", flagged, "--draft-layer-ids", convention)["draft"]
        assert (draft["version"], draft["flags"], draft["captured_states"]) == ("EAGLE-3.1", ["fc_norm", "norm_output"], f"inputs of layers {layers}")
    assert "readers disagree" in one_error(run("inspect", "--draft", flagged))
    status, out, _ = run("inspect", "--target", tmp_path / "deep", "--draft", flagged, "--draft-layer-ids", "input")
    assert status == 0 and "flags                    fc_norm, norm_output" in out and "the drafter fits the target" in out


def test_eagle3_answers_through_the_command_line(run, tmp_path):
    save_directory(tmp_path / "deep", "llama", num_hidden_layers=8, max_position_embeddings=1024)
    save_tokenizer(tmp_path / "deep")
    models = ("--target", tmp_path / "deep", "--draft", save_eagle3(tmp_path / "d", **{IDS: [1, 3, 5]}), "--max-new-tokens", "12")
    assert "--draft-layer-ids" in one_error(run("verify", "--suite", "gsm8k", "--limit", "2", *models))
    status, out, _ = run("verify", "--suite", "gsm8k", "--limit", "2", "--draft-layer-ids", "output", *models)
    assert status == 0 and "2/2 identical" in out, out


def test_inspect_own_embedding_and_biases(run, tmp_path):
    path = save_drafter(tmp_path / "d", qkv_bias=True, bias=False, rope_theta=5e5, edit=lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(83, 48)}))
    draft = json.loads(run("inspect", "--draft", path, "--json")[1])["draft"]
    assert (draft["fc_bias"], draft["qkv_bias"], draft["embeddings"], draft["head"], draft["rope_theta"]) == (False, True, "own", "target's", 5e5)


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
    "tree-too-small": (("generate", "hi", "--tree-top-k", "2", "--max-depth", "1", "--num-nodes", "5"), "num_nodes 5 is more than"),
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
        ("draft", "eagle-3", "config.json and tensors contradict each other"),
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
