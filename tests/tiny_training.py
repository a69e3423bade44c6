"""A tiny target with a chat template, conversations for it, and settings with which a drafter is trained in seconds."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from eagle_engine.training.config import TrainConfig
from eagle_engine.training.run import train
from tiny_pair import save_tokenizer
from tiny_targets import save_directory

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"


def make_target(directory: Path, layers: int = 7, case: str = "llama") -> Path:
    save_directory(directory, case, num_hidden_layers=layers)
    save_tokenizer(directory, TEMPLATE)
    return directory


def write_conversations(path: Path, count: int = 60, seed: int = 0) -> Path:
    generator = random.Random(seed)
    words = ["ab", "cd", "xyz", "no", "yes", "12", "+"]

    def text(n: int) -> str:
        return " ".join(generator.choice(words) for _ in range(n))

    rows = [{"messages": [{"role": "user", "content": text(4)}, {"role": "assistant", "content": text(6)}]} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_prompts(path: Path, count: int, seed: int = 0) -> Path:
    generator = random.Random(seed)
    rows = [{"id": i, "category": "ab"[i % 2], "prompt": "".join(generator.choice("abcdefgh ") for _ in range(6)) + "."} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_config(target: Path, out: Path, data: Path, **options) -> TrainConfig:
    settings = dict(
        version=1, max_length=64, validation_share=0.1, batch_size=2, epochs=2.0, learning_rate=3e-3, warmup_steps=2, unroll_steps=2, checkpoint_steps=3, evaluate_steps=4, log_steps=2,
        measure_prompts=0, states_dtype="float32", export_dtype="float32", device="cpu", threads=1,
    )  # fmt: skip
    return TrainConfig(target=str(target), out=str(out), data=[str(data)], **(settings | options))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "drafter" / "model.safetensors")


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


class Killed(BaseException):
    pass


def command(config: TrainConfig) -> list[str]:
    path = Path(config.out).with_suffix(".json")
    path.write_text(json.dumps(config.to_dict()))
    return [sys.executable, "-m", "eagle_engine.cli", "train", "--config", str(path)]
