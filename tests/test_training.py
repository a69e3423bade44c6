"""Whole training runs: resuming, several processes, export, faults, and a drafter that learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from eagle_engine.errors import EagleError
from eagle_engine.training import loop
from eagle_engine.training.config import TrainConfig
from eagle_engine.training.loop import learning_rate, read_metrics
from eagle_engine.training.run import train
from tiny_training import make_target, tiny_config, weights_of, write_conversations


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
    whole, broken = (tiny_config(target, tmp_path / name, data, **kind) for name in ("whole", "broken"))
    assert quietly(whole)[0].finished
    stops = 0
    broken.stop_after_minutes = 1e-9
    while not quietly(broken)[0].finished:
        stops += 1
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


def command(config: TrainConfig) -> list[str]:
    path = Path(config.out).with_suffix(".json")
    path.write_text(json.dumps(config.to_dict()))
    return [sys.executable, "-m", "eagle_engine.cli", "train", "--config", str(path)]


def test_killed_run_ends_as_an_unbroken_one(target, data, tmp_path):
    """SIGKILL at moments that nobody chose, SIGTERM once; the same bits in the end."""
    whole, killed = (tiny_config(target, tmp_path / name, data, epochs=12.0, checkpoint_steps=2) for name in ("whole", "killed"))
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
    assert "the same command goes on from there" not in said
    result = subprocess.run(command(killed), stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0 and "going on after" in result.stderr, result.stderr
    assert_same_weights(tmp_path / "whole", tmp_path / "killed")


# Several processes


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_train_as_one(target, data, tmp_path, mode):
    """Two processes over gloo with batches of two rows do the updates of one process with batches of four; they are stopped once and go on."""
    one = tiny_config(target, tmp_path / "one", data, batch_size=4, epochs=4.0, feature_noise=0.0)
    quietly(one)
    two = tiny_config(target, tmp_path / "two", data, batch_size=2, epochs=4.0, feature_noise=0.0)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *command(two)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if mode == "fsdp":
        environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
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
    kept = loop._checkpoints(tmp_path / "run")
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
    (tmp_path / "run" / "data.npz").unlink()
    with pytest.raises(EagleError, match="another data"):
        quietly(tiny_config(target, tmp_path / "run", write_conversations(tmp_path / "more.jsonl", 70, seed=1)))


@pytest.mark.parametrize(
    "options, message",
    [(dict(version=2), "version: expected 1"), (dict(version=1, fc_norm=True), "fc_norm is an option of EAGLE-3"), (dict(batch_size=0), "batch_size: expected a whole number of at least 1"),
     (dict(learning_rate=0.0), "learning_rate: expected a number above 0"), (dict(validation_share=1.0), "validation_share"), (dict(export_dtype="int8"), "export_dtype: expected one of"),
     (dict(temperatures=[]), "temperatures: expected at least one"), (dict(states="disk"), "states: expected one of"), (dict(epochs="two"), "epochs: expected float, got 'two'"),
     (dict(batch_size=2.5), "batch_size: expected int, got 2.5"), (dict(temperatures=[0.5, "x"]), "temperatures: expected list")],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_bad_settings(tmp_path, options, message):
    with pytest.raises(EagleError, match=message):
        tiny_config(tmp_path, tmp_path, tmp_path, **options)


@pytest.mark.parametrize(
    "options, message",
    [(dict(draft_vocab_size=10**6, version=3), "draft_vocab_size 1000000 is more than the target's vocabulary"), (dict(batch_size=100), "the data fills \\d+ rows of 64 tokens, 100 are needed"),
     (dict(max_length=8), "no conversation is left to train on:\n60 left out: longer than max_length 8"), (dict(version=3, captured_layers=[1, 2, 9]), "captured layers")],
    ids=["vocab", "batch", "length", "layers"],
)  # fmt: skip
def test_settings_that_do_not_fit(target, data, tmp_path, options, message):
    with pytest.raises(EagleError, match=message):
        quietly(tiny_config(target, tmp_path / "run", data, **options))


# What comes out


def test_run_directory(target, data, tmp_path):
    config = tiny_config(target, tmp_path / "run", data, measure_prompts=2)
    outcome, lines = quietly(config)
    run = tmp_path / "run"
    assert outcome.finished and outcome.acceptance_length >= 1
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.json", "data.npz", "drafter", "left_out.json", "metrics.jsonl", "states", "tensorboard"]
    assert sorted(path.name for path in (run / "drafter").iterdir()) == ["README.md", "config.json", "model.safetensors", "token_ranking.npy", "training.png"]
    assert (run / "drafter" / "training.png").read_bytes()[:4] == b"\x89PNG"
    card = (run / "drafter" / "README.md").read_text()
    assert f"{outcome.acceptance_length:.2f}" in card and "| learning_rate | 0.003 |" in card and str(tmp_path) not in card
    metrics = read_metrics(run / "metrics.jsonl")
    assert metrics[0]["step"] == 0 and metrics[-1]["step"] == max(line["step"] for line in metrics)
    assert sum("loss" in line for line in metrics) >= metrics[-1]["step"] // config.log_steps
    assert len(loop._checkpoints(run)) == loop.KEPT_CHECKPOINTS and list((run / "tensorboard").iterdir())


def test_learning_rate():
    config = TrainConfig(target="t", out="o", warmup_steps=4, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(config, step, 20) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0 and rates[12] == pytest.approx(0.55) and rates[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[4:], rates[5:]))
