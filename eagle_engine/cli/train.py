"""eagle train: a drafter for a target."""

from __future__ import annotations

import argparse
import json
import tomllib
from importlib.util import find_spec
from pathlib import Path

from eagle_engine.cli.common import note, print_json, show_progress
from eagle_engine.errors import EagleError
from eagle_engine.training.config import TrainConfig

USELESS = 1
STOPPED = 3

# Below this acceptance length a step of any tree costs more than it saves.
USEFUL_LENGTH = 1.2


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    for name in ("accelerate", "tensorboard", "matplotlib"):
        # The last two are needed when hours have gone by.
        if find_spec(name) is None:
            raise EagleError(f"training needs {name}: install the extra, pip install 'eagle-engine[train]'")
    from eagle_engine.training.run import train

    outcome = train(config, progress=show_progress(), say=note)
    if args.json:
        print_json({"finished": outcome.finished, "drafter": str(outcome.drafter), "acceptance_length": outcome.acceptance_length})
    elif outcome.finished:
        print(outcome.drafter)
    if not outcome.finished:
        return STOPPED
    if outcome.acceptance_length is None:
        note("eagle: warning: the drafter was not measured: there are no held-out prompts, or measure_prompts is 0")
        return 0
    note(f"acceptance length {outcome.acceptance_length:.2f} on held-out prompts")
    if outcome.acceptance_length < USEFUL_LENGTH:
        note(f"eagle: error: the drafter is useless: {outcome.acceptance_length:.2f} tokens per step; see {outcome.drafter / 'training.png'} and 'How to tell that it is broken' in docs/training.md")
        return USELESS
    return 0


def read_config(args: argparse.Namespace) -> TrainConfig:
    """The settings of --config with the options on top."""
    settings = {} if args.config is None else _read_file(Path(args.config).expanduser())
    settings |= {name.removeprefix("train_"): value for name, value in vars(args).items() if name.startswith("train_")}
    unknown = [name for name in settings if name not in TrainConfig.__dataclass_fields__]
    if unknown:
        raise EagleError(f"{args.config}: unknown setting {unknown[0]!r}; settings are {', '.join(TrainConfig.__dataclass_fields__)}")
    missing = [name for name in ("target", "out") if name not in settings]
    if missing:
        raise EagleError(f"give --{missing[0]}, or {missing[0]} in the file of --config (see eagle train --help)")
    return TrainConfig(**settings)


def _read_file(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise EagleError(f"--config {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise EagleError(f"--config {path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(settings, dict):
        raise EagleError(f"--config {path}: expected settings by name")
    return settings
