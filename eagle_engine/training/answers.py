"""On-policy data: prompts that the target answers itself, in batches, through the engine."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from eagle_engine.engine import Engine
from eagle_engine.errors import EagleError
from eagle_engine.sampling_params import SamplingParams


class ChatPrompt(NamedTuple):
    """A conversation that waits for the assistant; id is unique in its file."""

    id: str
    category: str
    token_ids: list[int]


class Answer(NamedTuple):
    """A prompt with the target's answer. finished: the answer ended by itself, it was not cut."""

    id: str
    category: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    temperature: float
    finished: bool


def read_answers(path: Path) -> list[Answer]:
    """What `write_answers` has written so far. A last line that a killed run left incomplete is not an answer."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    answers = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise EagleError(f"{path}, line {number}: not an answer as this program writes them ({error}); remove the line or the file") from error
    return answers


def write_answers(engine: Engine, prompts: Sequence[ChatPrompt], path: Path, *, temperatures: Sequence[float], max_new_tokens: int, seed: int = 0, progress: bool = True) -> dict[str, str]:
    """Let the target answer the prompts that have no answer in `path` yet, and append each answer as a JSON line as soon as it has ended; id -> why, of the prompts that could not be answered.

    temperatures  prompt i of the list gets temperatures[i % len(temperatures)]

    An answer depends on its prompt, its temperature, its id and the seed alone: a run that was killed and started again writes the answers that it would have written.
    """
    known = {answer.id for answer in read_answers(path)}
    _drop_incomplete_line(path)
    waiting = [(prompt, float(temperatures[i % len(temperatures)])) for i, prompt in enumerate(prompts) if prompt.id not in known]
    # Prompts of like length and temperature need not share a batch: every sequence has its own place, and the next prompt takes the place of an answer that has ended.
    waiting.reverse()
    running: dict[int, tuple[ChatPrompt, float]] = {}
    refused: dict[str, str] = {}
    with open(path, "ab") as file, tqdm(total=len(prompts), initial=len(known), desc="answering", unit="prompt", disable=not progress) as bar:
        while waiting or running:
            while waiting and len(running) < engine.config.max_batch_size:
                prompt, temperature = waiting.pop()
                params = SamplingParams(temperature=temperature, max_tokens=max_new_tokens, seed=seed + zlib.crc32(prompt.id.encode()))
                try:
                    running[engine.add_request(prompt.token_ids, params)] = (prompt, temperature)
                except EagleError as error:
                    refused[prompt.id] = str(error)
                    bar.update()
            for output in engine.step():
                prompt, temperature = running.pop(output.request_id)
                if output.finish_reason == "error":
                    refused[prompt.id] = str(output.error)
                else:
                    answer = Answer(prompt.id, prompt.category, prompt.token_ids, output.token_ids, temperature, output.finish_reason == "stop")
                    file.write(json.dumps(answer._asdict()).encode() + b"\n")
                    file.flush()
                bar.update()
    return refused


def _drop_incomplete_line(path: Path) -> None:
    """Cut what stands after the last line end, which a run that was killed while writing may have left."""
    if not path.is_file():
        return
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        data = b""
        while end > 0 and b"\n" not in data:
            start = max(0, end - 65536)
            file.seek(start)
            data = file.read(end - start) + data
            end = start
        file.truncate(end + data.rfind(b"\n") + 1 if b"\n" in data else 0)
