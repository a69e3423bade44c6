"""What the tests of the command line share: a tiny pair, a prompt file, a way to run a command in this process."""

import io
import json
import sys
from pathlib import Path

import pytest
from eagle_engine.cli import main
from eagle_engine.engine import Engine
from eagle_engine.request import Request
from tiny_pair import TinyPair, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": "one", "turns": ["Say one.", "And two?"]}, {"id": "two", "prompt": "x = 3 + 4"}, {"id": "three", "turns": ["Why?", "How?", "Who?"]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def run(pair, capsys, monkeypatch, restore_num_threads):
    """run(command, *options) -> status, stdout, stderr; the tiny pair unless the options say otherwise."""

    def call(command: str, *options: object, models: bool = True, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        argv = [command, *map(str, options)]
        if models:
            argv += ["--target", str(pair.target)] if "--target" not in argv else []
            argv += ["--draft", str(pair.draft)] if "--draft" not in argv else []
        capsys.readouterr()
        status = main(argv)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return call


def one_error(result: tuple[int, str, str]) -> str:
    """The message of a user error: status 2, one line on stderr, nothing on stdout."""
    status, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("eagle: ")]
    assert (status, out, len(lines)) == (2, "", 1), (status, out, err)
    assert lines[0].startswith("eagle: error: ") and err.endswith(lines[0] + "\n")
    return lines[0].removeprefix("eagle: error: ")


def plant_difference(monkeypatch, at: int) -> None:
    """Speculative answers get another token at one place."""
    original = Request.output

    def output(self):
        result = original(self)
        if plant_difference.speculative and len(result.token_ids) > at:
            result.token_ids[at] = (result.token_ids[at] + 1) % 80 + 3
        return result

    generate_original = Engine.generate

    def marked_generate(self, *arguments, **options):
        plant_difference.speculative = self.models.drafter is not None
        return generate_original(self, *arguments, **options)

    monkeypatch.setattr(Request, "output", output)
    monkeypatch.setattr(Engine, "generate", marked_generate)
