"""Whole training runs: resuming, several processes, export, faults, and a drafter that learns."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from eagle_engine import Engine, SamplingParams
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.drafter import Drafter
from eagle_engine.errors import EagleError
from eagle_engine.target import TargetModel
from eagle_engine.training import loop, run
from eagle_engine.training.answers import read_answers
from eagle_engine.training.config import TrainConfig, check_same_run
from eagle_engine.training.loop import learning_rate, read_metrics
from eagle_engine.training.dataset import TokenData
from eagle_engine.training.model import UnrolledAttention
from eagle_engine.training.run import train
from tiny_training import make_target, tiny_config, weights_of, write_conversations, write_prompts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl")


def quietly(config: TrainConfig):
    lines: list[str] = []
    return train(config, progress=False, say=lines.append), lines


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights_of(a), weights_of(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# Resuming

KINDS = {"eagle1-noise": dict(version=1, feature_noise=0.1), "eagle3": dict(version=3, draft_vocab_size=30), "accumulation": dict(version=1, gradient_accumulation=2), "live": dict(version=3, states="live")}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_stopped_run_ends_as_an_unbroken_one(target, data, tmp_path, kind):
    """Stopped after every few updates, between checkpoints too; the same bits, and the same metrics but for the times."""
    whole, broken = (tiny_config(target, tmp_path / name, data, epochs=1.2, **kind) for name in ("whole", "broken"))
    assert quietly(whole)[0].finished
    stops = 0
    broken.stop_after_minutes = 1e-9
    while not quietly(broken)[0].finished:
        stops += 1
        # The drafter so far is there, and no report that says it is done.
        assert weights_of(tmp_path / "broken") and not (tmp_path / "broken" / "drafter" / "README.md").exists()
    assert stops > 4
    assert_same_weights(tmp_path / "whole", tmp_path / "broken")
    held_out = [[line["held_out"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "held_out" in line] for name in ("whole", "broken")]
    assert held_out[0] == held_out[1] and len(held_out[0]) > 2


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["before-states", "half-written", "before-rename", "before-pruning"])
def test_death_while_a_checkpoint_is_written(target, data, tmp_path, monkeypatch, where):
    whole, config = (tiny_config(target, tmp_path / name, data) for name in ("whole", "killed"))
    quietly(whole)
    save = loop.Accelerator.save_state

    def die(self, directory, **options):
        if "step-00000006" in directory:
            if where != "before-states":
                save(self, directory, **options)
            if where == "half-written":
                (Path(directory) / "model.safetensors").write_bytes(b"half")
            if where != "before-pruning":
                raise Killed
        return save(self, directory, **options) if where != "before-pruning" or "step-00000006" not in directory else None

    with monkeypatch.context() as patch:
        patch.setattr(loop.Accelerator, "save_state", die)
        if where == "before-pruning":
            rmtree = loop.shutil.rmtree
            patch.setattr(loop.shutil, "rmtree", lambda path, **options: rmtree(path, **options) if options or "step-00000009" in str(path) else (_ for _ in ()).throw(Killed()))
            config.checkpoint_steps = 2
        with pytest.raises(Killed):
            quietly(config)
    config.checkpoint_steps = 3
    assert quietly(config)[0].finished
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("name", ["config.json", "left_out.json", "states.json", "metrics.jsonl"])
def test_death_while_a_small_file_is_written(target, data, tmp_path, monkeypatch, name):
    """At the first and at the second start of the run; the command goes on each time."""
    config = tiny_config(target, tmp_path / "run", data, epochs=0.5)
    write_text = Path.write_text

    def die(self, text, *args, **options):
        write_text(self, text[: len(text) // 2] if self.name.startswith(name) else text, *args, **options)
        if self.name.startswith(name):
            raise Killed

    for minutes in (1e-9, None):
        config.stop_after_minutes = minutes
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", die)
            try:
                quietly(config)
            except Killed:
                pass
        outcome, _ = quietly(config)
    assert outcome.finished and read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["step"] == 0 and json.loads((tmp_path / "run" / "left_out.json").read_text()) == {}


def test_death_between_the_data_and_what_was_left_out(target, data, tmp_path, monkeypatch):
    save = TokenData.save

    def die(self, path):
        save(self, path)
        raise Killed

    config = tiny_config(target, tmp_path / "run", data, epochs=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(TokenData, "save", die)
        with pytest.raises(Killed):
            quietly(config)
    assert quietly(config)[0].finished


@pytest.mark.parametrize("name", ["position.json", "model.safetensors", "optimizer.bin"])
def test_damaged_checkpoint(target, data, tmp_path, name):
    config = tiny_config(target, tmp_path / "run", data, stop_after_minutes=1e-9, epochs=0.2)
    quietly(config)
    path = loop.checkpoints(tmp_path / "run")[-1] / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(EagleError, match="step-00000001 cannot be read: .*; remove it, and the run goes on from the checkpoint before it, or from the start"):
        quietly(config)


def command(config: TrainConfig) -> list[str]:
    path = Path(config.out).with_suffix(".json")
    path.write_text(json.dumps(config.to_dict()))
    return [sys.executable, "-m", "eagle_engine.cli", "train", "--config", str(path)]


def test_killed_run_ends_as_an_unbroken_one(target, data, tmp_path):
    """SIGKILL at moments that nobody chose, SIGTERM once; the same bits in the end."""
    whole, killed = (tiny_config(target, tmp_path / name, data, epochs=6.0, checkpoint_steps=2) for name in ("whole", "killed"))
    quietly(whole)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for number, step in ((signal.SIGKILL, 4), (signal.SIGTERM, 12), (signal.SIGKILL, 20)):
        process = subprocess.Popen(command(killed), stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and max((line["step"] for line in read_metrics(metrics)), default=0) < step:
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate()
        assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 3), said
    assert "goes on from there" not in said
    result = subprocess.run(command(killed), stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0 and "going on after" in result.stderr, result.stderr
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")


# Several processes


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(target, data, tmp_path, mode):
    """Two processes over gloo with batches of two rows do the updates of one process with batches of four; they are stopped once and go on."""
    one = tiny_config(target, tmp_path / "one", data, batch_size=4, epochs=4.0, feature_noise=0.0)
    quietly(one)
    two = tiny_config(target, tmp_path / "two", data, batch_size=2, epochs=4.0, feature_noise=0.0)
    program = ["-m", "eagle_engine.cli"] if mode == "ddp" else [str(Path(__file__).parent / "fsdp_on_cpu.py")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *program, *command(two)[3:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for minutes, status in ((1e-9, 3), (None, 0)):
        two.stop_after_minutes = minutes
        command(two)
        result = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=300)
        assert (result.returncode == 0) == (status == 0), result.stderr[-3000:]
    first, second = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=2e-4)
    lines = [read_metrics(tmp_path / name / "metrics.jsonl")[-1]["held_out"] for name in ("one", "two")]
    assert lines[0]["acceptance_by_depth"] == pytest.approx(lines[1]["acceptance_by_depth"], abs=0.02)


def test_sharding_that_is_not_to_be_had_is_refused(target, data, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(EagleError, match="FSDP was asked for, .* runs as"):
        quietly(tiny_config(target, tmp_path / "run", data))


# Faults


def test_not_finite_loss_stops_the_run(target, data, tmp_path, monkeypatch):
    config = tiny_config(target, tmp_path / "run", data)
    from_position = loop.Batches.from_position

    def poisoned(self, position):
        for number, (place, batch) in enumerate(from_position(self, position), start=position):
            if number == 7:
                batch.states[0, 3] = float("nan")
            yield place, batch

    monkeypatch.setattr(loop.Batches, "from_position", poisoned)
    with pytest.raises(EagleError, match=r"the gradient is not finite at update 8 \(epoch \d+, batch \d+, loss nan\); the last good checkpoint is .*step-00000006.*Conversations of the batch: conversations.jsonl:"):
        quietly(config)
    monkeypatch.undo()
    kept = loop.checkpoints(tmp_path / "run")
    assert kept and all(bool(torch.isfinite(p).all()) for p in torch.load(kept[-1] / "optimizer.bin", weights_only=False)["state"][0].values())
    whole = tiny_config(target, tmp_path / "whole", data)
    quietly(whole), quietly(config)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_full_disk_keeps_the_last_checkpoint(target, data, tmp_path, monkeypatch):
    config = tiny_config(target, tmp_path / "run", data)
    save = loop.Accelerator.save_state

    def full(self, directory, **options):
        if "step-00000006" in directory:
            Path(directory, "part").write_bytes(b"x")
            raise OSError(28, "No space left on device")
        return save(self, directory, **options)

    monkeypatch.setattr(loop.Accelerator, "save_state", full)
    with pytest.raises(EagleError, match=r"step-00000006 cannot be written \(\d+ MB are free\): .*No space left on device; earlier checkpoints are kept"):
        quietly(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_checkpoint_of_another_target_data_or_setting(target, data, tmp_path):
    config = tiny_config(target, tmp_path / "run", data, stop_after_minutes=1e-9)
    quietly(config)
    other = make_target(tmp_path / "other", case="llama-mha")
    with pytest.raises(EagleError, match="another target"):
        quietly(tiny_config(other, tmp_path / "run", data))
    with pytest.raises(EagleError, match="was started with learning_rate 0.003, now it is 0.1"):
        quietly(tiny_config(target, tmp_path / "run", data, learning_rate=0.1))
    # One that was tuned from the first shares its configuration and its embedding.
    shutil.copytree(target, tmp_path / "tuned")
    weights = load_file(target / "model.safetensors")
    weights["model.layers.6.self_attn.v_proj.weight"] += 0.01
    save_file(weights, tmp_path / "tuned" / "model.safetensors")
    with pytest.raises(EagleError, match="another target weights"):
        quietly(tiny_config(tmp_path / "tuned", tmp_path / "run", data))
    shutil.rmtree(tmp_path / "run" / "states")
    with pytest.raises(EagleError, match="is a checkpoint of another target weights"):
        quietly(tiny_config(tmp_path / "tuned", tmp_path / "run", data))
    shutil.rmtree(tmp_path / "run" / "states")
    (tmp_path / "run" / "data.npz").unlink()
    with pytest.raises(EagleError, match="another data"):
        quietly(tiny_config(target, tmp_path / "run", write_conversations(tmp_path / "more.jsonl", 70, seed=1)))


def test_answers_of_another_target(target, tmp_path, monkeypatch):
    """A run that was stopped while the target answered does not go on with another one."""
    config = tiny_config(target, tmp_path / "run", write_prompts(tmp_path / "prompts.jsonl", 4), max_new_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(run, "build_data", lambda *args: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            quietly(config)
    config.target = str(make_target(tmp_path / "other", case="llama-mha"))
    with pytest.raises(EagleError, match=r"answers.jsonl holds answers of target .*, now it is .*other: give the old one"):
        quietly(config)


def test_a_run_keeps_its_data(target, data, tmp_path):
    """Other files are not passed over in silence, and the model card names what was learned from."""
    config = tiny_config(target, tmp_path / "run", data, epochs=0.2, stop_after_minutes=1e-9)
    quietly(config)
    more = write_conversations(tmp_path / "more.jsonl", 5, seed=1)
    _, lines = quietly(tiny_config(target, tmp_path / "run", more, epochs=0.2))
    assert f"the run goes on with its own data, made from {data}; other files need another run directory" in lines
    assert "Files: conversations.jsonl." in (tmp_path / "run" / "drafter" / "README.md").read_text()


def test_accumulation_over_more_than_an_epoch(target, data, tmp_path):
    """As many rows are learned from as without: updates run across the ends of epochs."""
    _, lines = quietly(tiny_config(target, tmp_path / "run", data, epochs=4.0, gradient_accumulation=40))
    _, plain = quietly(tiny_config(target, tmp_path / "plain", data, epochs=4.0))
    updates, batches = (int(next(line for line in said if line.endswith(" updates")).split()[0]) for said in (lines, plain))
    assert updates == batches // 40 > 1


@pytest.fixture
def fresh_accelerate():
    """accelerate keeps one state for a process, with one precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_held_out_figures_are_computed_in_float32(target, data, tmp_path, monkeypatch, fresh_accelerate):
    seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    logits = run.TrainableDrafter.logits

    def spy(self, features, target_head):
        result = logits(self, features, target_head)
        seen[self.training].add(result.dtype)
        return result

    monkeypatch.setattr(run.TrainableDrafter, "logits", spy)
    for version in (1, 3):
        quietly(tiny_config(target, tmp_path / f"run{version}", data, version=version, epochs=0.2, precision="bfloat16"))
    assert seen == {True: {torch.bfloat16}, False: {torch.float32}}


def test_what_is_too_long_is_counted(target, tmp_path, capfd):
    """Prompts that cannot be answered, and conversations beyond the positions that the target knows; nothing of it on the standard output."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    with open(prompts, "a") as file:
        file.write(json.dumps({"prompt": "ab" * 100}) + "\n")
        file.write(json.dumps({"messages": [{"role": "user", "content": "ab" * 100}, {"role": "assistant", "content": "a"}]}) + "\n")
    config = tiny_config(target, tmp_path / "run", prompts, max_length=2000, max_new_tokens=4, temperatures=[0.0], batch_size=1, epochs=1.0)
    _, lines = quietly(config)
    assert json.loads((tmp_path / "run" / "left_out.json").read_text()) == {"the prompt could not be answered": 1, "longer than max_length 128": 1}
    assert any(line.startswith("1 left out: the prompt could not be answered (first: prompts.jsonl:prompts.jsonl, line 21: ") for line in lines)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    "kind, version, message",
    [(DistributedType.FSDP, 1, "set fsdp_version: 2"), (DistributedType.DEEPSPEED, 0, "accelerate runs as DEEPSPEED"), (DistributedType.FSDP, 2, None), (DistributedType.MULTI_GPU, 0, None)],
    ids=["fsdp1", "deepspeed", "fsdp2", "ddp"],
)  # fmt: skip
def test_ways_of_distribution(kind, version, message):
    accelerator = SimpleNamespace(distributed_type=kind, state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version)))
    with nullcontext() if message is None else pytest.raises(EagleError, match=message):
        run._check_distribution(accelerator)


def test_packages_are_asked_for_before_hours_have_gone_by(tmp_path, monkeypatch, capsys):
    from eagle_engine.cli import main
    from eagle_engine.cli import train as command_module

    monkeypatch.setattr(command_module, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert main(["train", "--target", "demo", "--out", str(tmp_path / "run")]) == 2
    assert "training needs matplotlib: install the extra" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options, message",
    [(dict(version=2), "version: expected 1"), (dict(version=1, fc_norm=True), "fc_norm is an option of EAGLE-3"), (dict(batch_size=0), "batch_size: expected a whole number of at least 1"),
     (dict(learning_rate=0.0), "learning_rate: expected a number above 0"), (dict(validation_share=1.0), "validation_share"), (dict(export_dtype="int8"), "export_dtype: expected one of"),
     (dict(temperatures=[]), "temperatures: expected at least one"), (dict(states="disk"), "states: expected one of"), (dict(epochs="two"), "epochs: expected float, got 'two'"),
     (dict(batch_size=2.5), "batch_size: expected int, got 2.5"), (dict(temperatures=[0.5, "x"]), "temperatures: expected list"),
     (dict(device="gpu"), "device: expected one of auto, cpu, cuda, got 'gpu'"), (dict(epochs=float("inf")), "epochs: expected a number above 0, got inf"), (dict(temperatures=[float("nan")]), "temperatures: expected"), (dict(seed=-1), "seed: expected a whole number from 0")],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_bad_settings(tmp_path, options, message):
    with pytest.raises(EagleError, match=message):
        tiny_config(tmp_path, tmp_path, tmp_path, **options)


@pytest.mark.parametrize(
    "options, message",
    [(dict(draft_vocab_size=10**6, version=3), "draft_vocab_size 1000000 is more than the target's vocabulary"), (dict(batch_size=100), "the data fills \\d+ rows of 64 tokens, 100 are needed"),
     (dict(max_length=8), "no conversation is left to train on:\n60 left out: longer than max_length 8"), (dict(version=3, captured_layers=[1, 2, 9]), "captured layers"),
     (dict(version=3, captured_layers=[1, 2, 7]), "captured layer 7, the output of the last layer"), (dict(start_from="nowhere"), "nowhere: no such drafter directory")],
    ids=["vocab", "batch", "length", "layers", "last-layer", "start"],
)  # fmt: skip
def test_settings_that_do_not_fit(target, data, tmp_path, options, message):
    """Those that have nothing to do with the data are refused before it is made."""
    with pytest.raises(EagleError, match=message):
        quietly(tiny_config(target, tmp_path / "run", data, **options))
    assert (tmp_path / "run" / "data.npz").exists() == ("batch_size" in options)


# What comes out


def test_run_directory(target, data, tmp_path):
    config = tiny_config(target, tmp_path / "run", data, measure_prompts=2)
    outcome, lines = quietly(config)
    directory = tmp_path / "run"
    assert outcome.finished and outcome.acceptance_length >= 1
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "config.json", "data.npz", "drafter", "left_out.json", "metrics.jsonl", "states", "tensorboard"]
    assert sorted(path.name for path in (directory / "drafter").iterdir()) == ["README.md", "config.json", "model.safetensors", "token_ranking.npy", "training.png"]
    assert (directory / "drafter" / "training.png").read_bytes()[:4] == b"\x89PNG"
    card = (directory / "drafter" / "README.md").read_text()
    assert f"{outcome.acceptance_length:.2f}" in card and "| learning_rate | 0.003 |" in card and str(tmp_path) not in card
    metrics = read_metrics(directory / "metrics.jsonl")
    assert metrics[0]["step"] == 0 and metrics[-1]["step"] == max(line["step"] for line in metrics)
    assert sum("loss" in line for line in metrics) >= metrics[-1]["step"] // config.log_steps
    assert len(loop.checkpoints(directory)) == loop.KEPT_CHECKPOINTS and list((directory / "tensorboard").iterdir())


EXPORTS = {
    "eagle1": dict(version=1), "eagle3": dict(version=3, draft_vocab_size=30), "eagle3-narrow": dict(version=3, hidden_size=24), "eagle3.1": dict(version=3, fc_norm=True, norm_output=True),
    "eagle3-layers": dict(version=3, captured_layers=[0, 3, 6]), "float16": dict(version=3, export_dtype="float16"), "float8": dict(version=3, draft_vocab_size=30, export_dtype="float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize("options", EXPORTS.values(), ids=EXPORTS)
def test_exported_drafter_computes_what_was_trained(target, data, tmp_path, options):
    """Export, strict loading, and the engine's forward and logits against the trainer's: a prompt, then two levels that are fed with their own features."""
    captured = []
    drafter_class = run.TrainableDrafter

    class Kept(drafter_class):
        def __init__(self, *args):
            super().__init__(*args)
            captured.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "TrainableDrafter", Kept)
        quietly(tiny_config(target, tmp_path / "run", data, **({"export_dtype": "float32"} | options)))
    trained = captured[0]
    checkpoint = open_checkpoint(target)
    model = TargetModel.from_checkpoint(checkpoint, torch.float32, 64, progress=False)
    drafter = Drafter.from_directory(tmp_path / "run" / "drafter", model, max_positions=64)
    parts, c = run.target_parts(checkpoint), trained.config.layer
    n, levels = 9, 2
    tokens = torch.randint(3, 80, (1, n + levels))
    states = torch.randn(1, n - 1, trained.config.fused_size)
    trained.prepare()
    attend = UnrolledAttention(trained.config, torch.ones(1, n - 1, n - 1, dtype=torch.bool).tril(), torch.arange(n - 1)[None], 3)
    cache, page_table = torch.zeros(2, 4, 16, c.num_kv_heads, c.head_dim), torch.arange(4, dtype=torch.int32)[None]
    with torch.no_grad():
        ours, theirs = trained.fuse(states), drafter.fuse(states)
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
        length, position_ids = torch.zeros(1, dtype=torch.int32), torch.arange(n - 1)[None]
        fed = tokens[:, 1:n]
        for level in range(1 + levels):
            # The trainer feeds every row; only the last one is a draft after the whole prompt.
            shifted = torch.cat((fed[:, level:], tokens[:, n : n + level]), dim=1)
            ours = trained.layer(trained.embed(shifted, parts.embedding), ours, attend)
            theirs = drafter.forward(fed if level == 0 else shifted[:, -1:], theirs.clone(), position_ids, cache, length, page_table)
            torch.testing.assert_close(theirs[:, -1], ours[:, -1], rtol=1e-3, atol=1e-4)
            head = parts.head if trained.config.version == 1 else None
            torch.testing.assert_close(drafter.logits(theirs[:, -1].contiguous()), trained.logits(ours[:, -1], head), rtol=1e-3, atol=1e-3)
            theirs, position_ids, length = theirs[:, -1:], position_ids[:, -1:] + 1, length + (n - 1 if level == 0 else 1)


@pytest.mark.parametrize("version", [1, 3])
def test_a_drafter_learns_a_small_set_by_heart(target, tmp_path, version):
    """The whole way from prompts to a drafter: the target answers, the drafter overfits, and the engine emits more than three tokens per step on these prompts."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 10)
    config = tiny_config(
        target, tmp_path / "run", prompts, version=version, epochs=200.0, max_length=128, learning_rate=6e-3, warmup_steps=20, intermediate_size=192, unroll_steps=4, unroll_decay=0.8, token_loss_weight=1.0,
        feature_loss_weight=0.1 if version == 1 else 0.0, feature_noise=0.0, max_new_tokens=40, temperatures=[0.0], evaluate_steps=1000, checkpoint_steps=1000, log_steps=50,
    )  # fmt: skip
    _, lines = quietly(config)
    assert "10 prompts are answered by the target" in lines
    answers, data = read_answers(tmp_path / "run" / "answers.jsonl"), TokenData.load(tmp_path / "run" / "data.npz")
    trained = [answer for answer in answers if answer.id in set(data.ids[~data.held_out])]
    engine = Engine.from_pretrained(target, tmp_path / "run" / "drafter", draft_vocab=None, progress=False, tree="chain", max_depth=5, max_model_len=100)
    outputs = engine.generate([answer.prompt_token_ids for answer in trained], SamplingParams(temperature=0.0, max_tokens=40))
    assert [output.token_ids for output in outputs] == [answer.token_ids for answer in trained]
    length = sum(len(output.token_ids) - 1 for output in outputs) / sum(output.stats.steps for output in outputs)
    assert length > 3, length


def test_answers_go_on_where_they_were_stopped(target, tmp_path, monkeypatch):
    """Killed after some answers, in the middle of a line; the same answers as an unbroken run, at every temperature."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 12)
    options = dict(epochs=1.0, max_new_tokens=12, temperatures=[0.0, 1.0, 0.7], max_length=64, answer_batch_size=3)
    quietly(tiny_config(target, tmp_path / "whole", prompts, **options))
    step, taken = Engine.step, []

    def die(self):
        taken.append(1)
        if len(taken) == 16:
            raise Killed
        return step(self)

    monkeypatch.setattr(Engine, "step", die)
    with pytest.raises(Killed):
        quietly(tiny_config(target, tmp_path / "broken", prompts, **options))
    monkeypatch.undo()
    path = tmp_path / "broken" / "answers.jsonl"
    before = path.read_bytes()
    assert 0 < before.count(b"\n") < 12
    path.write_bytes(before + b'{"id": "prompts.jsonl:1", "categ')
    quietly(tiny_config(target, tmp_path / "broken", prompts, **(options | dict(answer_batch_size=5))))
    whole, broken = ({answer.id: answer for answer in read_answers(tmp_path / name / "answers.jsonl")} for name in ("whole", "broken"))
    assert whole == broken and len(whole) == 12 and path.read_bytes().startswith(before)
    assert {answer.temperature for answer in whole.values()} == {0.0, 1.0, 0.7}


def test_start_from_another_drafter(target, data, tmp_path):
    """The first weights are that drafter's; its head is taken by tokens where the draft vocabularies differ; another kind is refused."""
    first = tiny_config(target, tmp_path / "first", data, version=3, draft_vocab_size=30)
    quietly(first)
    drafters = []
    for size in (30, 40):
        config = tiny_config(target, tmp_path / f"next{size}", data, version=3, draft_vocab_size=size, start_from=str(tmp_path / "first" / "drafter"), learning_rate=1e-12, weight_decay=0.0, epochs=0.5)
        quietly(config)
        drafters.append(weights_of(tmp_path / f"next{size}"))
    old = weights_of(tmp_path / "first")
    for name, weight in old.items():
        if name not in ("lm_head.weight", "d2t", "t2d"):
            for drafter in drafters:
                torch.testing.assert_close(drafter[name], weight)
    old_ids, new_ids = (list((w["d2t"] + torch.arange(len(w["d2t"]))).tolist()) for w in (old, drafters[1]))
    for row, token in enumerate(old_ids):
        torch.testing.assert_close(drafters[1]["lm_head.weight"][new_ids.index(token)], old["lm_head.weight"][row])
    # A run that goes on does not need it any more; rows of a head over the whole vocabulary are taken, too.
    config.start_from, config.epochs = str(tmp_path / "moved"), 0.6
    (tmp_path / "first").rename(tmp_path / "moved")
    with pytest.raises(EagleError, match="was started with start_from"):
        quietly(config)
    config.start_from = str(tmp_path / "first" / "drafter")
    assert quietly(config)[0].finished
    (tmp_path / "moved").rename(tmp_path / "first")
    whole = tiny_config(target, tmp_path / "whole", data, version=3, draft_vocab_size=83, epochs=0.2)
    quietly(whole)
    quietly(tiny_config(target, tmp_path / "part", data, version=3, draft_vocab_size=30, start_from=str(tmp_path / "whole" / "drafter"), learning_rate=1e-12, weight_decay=0.0, epochs=0.2))
    full, part = weights_of(tmp_path / "whole"), weights_of(tmp_path / "part")
    torch.testing.assert_close(part["lm_head.weight"], full["lm_head.weight"][part["d2t"] + torch.arange(30)])
    with pytest.raises(EagleError, match=r"start_from .*: weight fc.weight is \[48, 96\], that drafter has \[48, 144\]: a run starts from a drafter of the same version"):
        quietly(tiny_config(target, tmp_path / "wrong", data, version=1, start_from=str(tmp_path / "first" / "drafter")))


def test_useless_drafter_is_not_passed_over_in_silence(target, data, tmp_path, capsys):
    """The command ends with status 1 and says so."""
    from eagle_engine.cli import main

    status = main(["train", "--config", command(tiny_config(target, tmp_path / "run", data, epochs=0.5, measure_prompts=2))[-1], "--json"])
    out, err = capsys.readouterr()
    assert status == 1 and "eagle: error: the drafter is useless: 1." in err and json.loads(out)["acceptance_length"] < 1.2


def test_command_line(target, data, tmp_path, capsys):
    from eagle_engine.cli import main

    settings = tmp_path / "settings.toml"
    settings.write_text(f'target = "{target}"\nout = "{tmp_path / "run"}"\ndata = ["{data}"]\nversion = 1\nmax_length = 64\nepochs = 9.0\n')
    options = ["--epochs", "0.5", "--batch-size", "2", "--measure-prompts", "0", "--device", "cpu", "--temperatures", "0", "0.5"]
    assert main(["train", "--config", str(settings), *options]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'run' / 'drafter'}\n" and "the drafter was not measured" in err
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["epochs"] == 0.5 and recorded["max_length"] == 64 and recorded["temperatures"] == [0.0, 0.5]
    for arguments, message in (
        (["--out", "x"], "give --target"), (["--config", str(tmp_path / "none.toml")], "No such file"), (["--target", "demo", "--out", str(tmp_path / "new")], "give at least one file of conversations or prompts"),
        (["--config", str(settings), "--epochs", "0"], "epochs: expected a number above 0"), (["--config", str(data)], "not valid TOML"),
    ):  # fmt: skip
        assert main(["train", *arguments]) == 2
        assert message in capsys.readouterr().err
    settings.write_text("speed = 3\n")
    assert main(["train", "--config", str(settings)]) == 2 and "unknown setting 'speed'" in capsys.readouterr().err


def test_a_run_of_an_older_version_goes_on(tmp_path):
    """One that knew fewer settings; those that it knew are compared."""
    config = tiny_config(tmp_path, tmp_path, tmp_path)
    recorded = {name: value for name, value in config.to_dict().items() if name != "norm_output"}
    check_same_run(config, recorded, tmp_path)
    with pytest.raises(EagleError, match="was started with seed 1, now it is 0"):
        check_same_run(config, recorded | {"seed": 1}, tmp_path)


def test_learning_rate():
    config = TrainConfig(target="t", out="o", warmup_steps=4, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(config, step, 20) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0 and rates[12] == pytest.approx(0.55) and rates[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[4:], rates[5:]))
