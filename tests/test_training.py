"""Whole training runs: what they leave behind, export, and a drafter that learns."""

from __future__ import annotations

import json

import pytest
import torch
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
from tiny_training import data, target  # noqa: F401  (fixtures)
from tiny_training import Killed, command, quietly, tiny_config, weights_of, write_prompts


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
