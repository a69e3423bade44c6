"""Prompt sets: those that ship with the package, and JSON-lines files of the same form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from eagle_engine.errors import EagleError

_DIRECTORY = Path(__file__).parent / "data" / "eval"
SUITES = ("mt_bench", "humaneval", "gsm8k")


class EvalPrompt(NamedTuple):
    """One conversation: the user's turns, to be answered in order."""

    id: str
    category: str
    turns: list[str]


def load_prompts(source: str | Path, limit: int | None = None) -> list[EvalPrompt]:
    """The first `limit` prompts (default all) of a suite by name, or of a JSON-lines file.

    A line is {"id": ..., "category": ..., "turns": ["...", ...]}; id defaults to the line's number, category to the file's name,
    and "prompt": "..." is short for one turn. Blank lines are skipped.
    """
    if limit is not None and limit < 1:
        raise EagleError(f"limit must be at least 1, got {limit}")
    path = _DIRECTORY / f"{source}.jsonl" if str(source) in SUITES else Path(source).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: texts may hold U+2028
    except (FileNotFoundError, IsADirectoryError):
        raise EagleError(
            f"{source}: no such prompt file; the suites that ship with the package are {', '.join(SUITES)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EagleError(f"{source}: the prompt file cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_parse(path, number, line))
    if not prompts:
        raise EagleError(f"{source}: the prompt file is empty")
    return prompts


def _parse(path: Path, number: int, line: str) -> EvalPrompt:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise EagleError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise EagleError(f"{where}: expected a JSON object, got {type(row).__name__}")
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if not isinstance(turns, list) or not turns:
        raise EagleError(f'{where}: expected "turns", a list of at least one text')
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise EagleError(f'{where}: every entry of "turns" must be a text that is not blank')
    return EvalPrompt(str(row.get("id", number)), str(row.get("category") or path.stem), turns)
