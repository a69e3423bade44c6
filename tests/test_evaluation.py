"""Prompt files: the shipped suites, the file format, and errors that name the line."""

import pytest

from eagle_engine.errors import EagleError
from eagle_engine.evaluation import SUITES, EvalPrompt, load_prompts


@pytest.mark.parametrize("suite", SUITES)
def test_shipped_suites(suite):
    prompts = load_prompts(suite)
    assert len(prompts) == 80
    assert len({prompt.id for prompt in prompts}) == 80
    assert all(len(prompt.turns) == (2 if suite == "mt_bench" else 1) for prompt in prompts)
    assert load_prompts(suite, limit=3) == prompts[:3]


def test_file_format(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"id": 7, "category": "maths", "turns": ["one", "two\u2028three"]}\r\n\n{"prompt": "short"}\n',
        encoding="utf-8",
    )
    assert load_prompts(path) == [
        EvalPrompt("7", "maths", ["one", "two\u2028three"]),
        EvalPrompt("3", "mine", ["short"]),
    ]
    assert load_prompts(str(path), limit=10) == load_prompts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ('{"id": 1}', 'line 2: expected "turns"'),
        ('{"turns": []}', 'line 2: expected "turns"'),
        ('{"turns": "text"}', 'line 2: expected "turns"'),
        ('{"turns": ["a", " "]}', 'line 2: every entry of "turns" must be a text'),
        ('{"turns": [1]}', 'line 2: every entry of "turns" must be a text'),
        ('{"prompt": ""}', 'line 2: every entry of "turns" must be a text'),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"turns": ["fine"]}}\n{line}\n')
    with pytest.raises(EagleError, match=f"bad.jsonl, {message}"):
        load_prompts(path)
    assert len(load_prompts(path, limit=1)) == 1


def test_bad_sources(tmp_path):
    with pytest.raises(EagleError, match="no such prompt file; the suites that ship with the package are mt_bench"):
        load_prompts("mt_bunch")
    with pytest.raises(EagleError, match="no such prompt file"):
        load_prompts(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(EagleError, match="the prompt file is empty"):
        load_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(EagleError, match="cannot be read"):
        load_prompts(tmp_path / "latin.jsonl")
    with pytest.raises(EagleError, match="limit must be at least 1"):
        load_prompts("mt_bench", limit=0)
