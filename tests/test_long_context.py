"""bench/long_context.py: conversations of the asked lengths, a window that is used, and answers that are compared."""

import argparse
import importlib
from pathlib import Path

import pytest
import torch
from cli_runner import pair  # noqa: F401  (fixture)
from eagle_engine import Engine

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def long_context(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("long_context")


@pytest.fixture
def setting(long_context, pair):
    """The tiny pair, and small arguments."""
    engine = Engine.from_pretrained(pair.target, pair.draft, tree="dynamic", progress=False, max_batch_size=1, top_k=3, max_depth=2, num_nodes=6)
    arguments = "--lengths 60 110 --windows 0 8 --conversations 2 --questions 2 --answer-tokens 8 --max-new-tokens 10 --top-k 3 --max-depth 2 --num-nodes 6"
    return engine, long_context.parser().parse_args(arguments.split())


@pytest.fixture
def questions(long_context, monkeypatch):
    rows = [argparse.Namespace(turns=[f"q{i}?"]) for i in range(50)]
    monkeypatch.setattr(long_context, "load_prompts", lambda name: rows)


def test_lengths_windows_and_comparisons(long_context, setting, questions, capsys):
    engine, args = setting
    drafter, used = engine.models.drafter, []
    original = drafter.forward
    drafter.forward = lambda *arguments, **named: used.append(drafter.window) or original(*arguments, **named)
    result = long_context.run(engine.plain(), {"mine": drafter}, args)
    assert [one["length"] for one in result["results"]] == [60, 110]
    for one in result["results"]:
        # Whole turns as far as they fit, then one of two questions, in each of two conversations.
        assert len(one["prompt_tokens"]) == 4 and all(one["length"] - 20 < tokens <= one["length"] + 10 for tokens in one["prompt_tokens"])
        assert [(row["drafter"], row["window"], row["different_answers"]) for row in one["rows"]] == [("mine", 0, 0), ("mine", 8, 0)]
        assert all(1.0 <= row["acceptance_length"] <= 3.0 and row["steps"] > 0 for row in one["rows"])
    assert set(used) == {0, 8}
    assert capsys.readouterr().out.count("acceptance length") == 4


def test_a_difference_is_counted(long_context, setting):
    engine, args = setting
    params = long_context.SamplingParams(temperature=0.0, max_tokens=10)
    prompt = engine.encode_chat([{"role": "user", "content": "hi"}])
    plain = engine.plain().generate([prompt], params)[0].token_ids
    for answer, count in ((plain, 0), (plain[:-1] + [plain[-1] + 1], 1)):
        assert long_context.measure(engine.plain(), engine.models.drafter, engine.config, 0, [prompt], [answer], params)["different_answers"] == count


def test_too_few_questions_are_told(long_context, setting):
    engine, _ = setting
    with pytest.raises(SystemExit, match="do not fill 500 tokens"):
        long_context.grow_conversation(engine, ["a?", "b?"], 500, 4)


def test_a_window_changes_drafts_beyond_it_and_no_draft_within(setting):
    """The drafter's features behind a prompt longer than the window, and one that fits."""
    engine, _ = setting
    drafter, state = engine.models.drafter, engine.state
    features = {}
    for length in (5, 30):
        for window in (0, 8):
            drafter.window = window
            ids = torch.arange(length)[None] % 60 + 3
            cache, table = torch.zeros_like(state.draft_cache[0]), torch.arange(8, dtype=torch.int32)[None]
            inputs = torch.randn(1, length, drafter.config.fused_size, generator=torch.Generator().manual_seed(1))
            features[length, window] = drafter.forward(ids, inputs, torch.arange(length)[None], cache, torch.zeros(1, dtype=torch.int32), table)
    drafter.window = 0
    assert torch.equal(features[5, 0], features[5, 8])
    assert torch.equal(features[30, 0][:, :8], features[30, 8][:, :8]) and not torch.equal(features[30, 0][:, 8:], features[30, 8][:, 8:])
