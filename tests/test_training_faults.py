"""What can go wrong with a training run, and what is then left of it."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from eagle_engine.errors import EagleError
from eagle_engine.training import loop, run
from tiny_training import data, target  # noqa: F401  (fixtures)
from tiny_training import Killed, assert_same_weights, make_target, quietly, tiny_config, write_conversations, write_prompts


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
