"""Training runs that are stopped, killed or shared among processes."""

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
from eagle_engine.training.loop import read_metrics
from eagle_engine.training.dataset import TokenData
from tiny_training import data, target  # noqa: F401  (fixtures)
from tiny_training import Killed, assert_same_weights, command, quietly, tiny_config, weights_of

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
