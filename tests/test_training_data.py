"""From files to rows: chat-template spans, what is left out, sampling, splitting, packing."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest
import torch
from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.errors import EagleError
from eagle_engine.evaluation import load_prompts
from eagle_engine.tokenizer import Tokenizer
from eagle_engine.training.answers import ChatPrompt
from eagle_engine.training.batches import Batches
from eagle_engine.training.conversations import Conversation, EvaluationTexts, LeftOut, encode_conversation, read_files, sample_by_category
from eagle_engine.training.dataset import TokenData, build_data, pack
from eagle_engine.training.report import measured_prompts
from eagle_engine.training.target_states import States
from tiny_pair import save_tokenizer
from tiny_targets import save_directory
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

CHATML = "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
# As Qwen3's: what the assistant thought is cut from all turns but the last.
FORGETFUL = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + (m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('=')[-1]) + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
# No mark at the end of an answer.
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Q: ' + m['content'] + '\n' }}{% elif m['role'] == 'assistant' %}{{ 'A: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)


# As Mistral's: the system message stands in the last user's turn, if nothing follows it. As DeepSeek-R1's: the generation prompt opens a thought that no turn in the conversation shows.
LATE_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Q: ' + (messages[0]['content'] + ' ' if loop.last and messages[0]['role'] == 'system' else '') + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ 'A: ' + m['content'] + '</s>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
THINKING = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'].split('=')[-1] + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:x=' }}{% endif %}"


def tokenizer_of(tmp_path, template):
    save_directory(tmp_path / "t", "llama")
    save_tokenizer(tmp_path / "t", template)
    return Tokenizer.from_checkpoint(open_checkpoint(tmp_path / "t"))


def said(tokenizer, messages) -> list[str]:
    """The runs of supervised tokens, as text."""
    ids, supervised, _ = encode_conversation(tokenizer, messages)
    assert ids == tokenizer.encode_chat(messages, add_generation_prompt=False)
    runs, before = [], False
    for token, mark in zip(ids, supervised):
        if mark:
            runs[-1:] = [(runs[-1] if before else "") + tokenizer.decode([token], False)] if before else runs[-1:] + [tokenizer.decode([token], False)]
        before = mark
    return runs


def turns(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    "template, expected",
    [(CHATML, ["yes</s>", "a=b</s>"]), (PLAIN, ["yes\n", "a=b\n"]), (FORGETFUL, ["yes</s>", "a=b</s>"])],
    ids=["chatml", "no-end-token", "forgetful"],
)
def test_only_the_assistant_is_learned(tmp_path, template, expected):
    """By the template's own offsets, even where a user repeats what the assistant says; nothing after an end token."""
    assert said(tokenizer_of(tmp_path, template), turns("yes", "yes", "A: a=b", "a=b")) == expected


def test_a_turn_that_later_ones_change_is_not_learned(tmp_path):
    assert said(tokenizer_of(tmp_path, FORGETFUL), turns("q", "x=y", "r", "z")) == ["z</s>"]


def test_first_message_of_the_assistant_has_no_prompt(tmp_path):
    assert said(tokenizer_of(tmp_path, CHATML), [{"role": "assistant", "content": "hi"}, *turns("q", "z")]) == ["z</s>"]


@pytest.mark.parametrize("template", [LATE_SYSTEM, THINKING], ids=["late-system", "thinking"])
def test_turns_that_do_not_follow_the_generation_prompt_are_counted(tmp_path, template):
    tokenizer, left_out = tokenizer_of(tmp_path, template), LeftOut()
    rows = [{"messages": [{"role": "system", "content": "s"}, *turns("q", "x=y", "r", "z")]}]
    conversations, _ = read_files([write_lines(tmp_path / "d.jsonl", rows)], tokenizer, left_out)
    assert not conversations and left_out.counts["no assistant turn to learn"] == 1
    assert any(line.startswith("2 left out: an assistant's turn") and "writes otherwise than after its generation prompt" in line for line in left_out.lines())


@pytest.mark.parametrize("trim", [True, False])
def test_tokens_of_spaces_are_learned(trim):
    """Also with a tokenizer whose offsets leave spaces out, as Llama-3's do: a token of spaces alone is empty there."""
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(backend, CHATML, {"eos_token": "</s>"}, [])
    assert said(tokenizer, turns(" q ", "def f():\n    return  x  ", "  ", " u\n ")) == ["def f():\n    return  x  </s>", " u\n </s>"]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_cannot_be_used_is_counted_and_named(tmp_path):
    tokenizer = tokenizer_of(tmp_path, CHATML)
    copied = load_prompts("mt_bench")[0].turns[0]
    rows = [
        {"messages": turns("a", "b")},
        {"messages": [{"role": "wizard", "content": "x"}, *turns("a", "b")]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"text": "x"},
        {"messages": turns(f"Well: {copied.upper()}", "b")},
        {"prompt": copied},
        {"prompt": "x", "category": "c"},
        {"turns": ["y", "later"]},
        {"messages": turns("a", "b", "c")},
        {"turns": []},
        {"turns": "ab"},
        {"messages": turns("a", "\ud800")},
        {"prompt": "\ud800"},
        {"prompt_token_ids": tokenizer.encode_chat(turns(copied)), "token_ids": [3], "id": "1", "category": "", "temperature": 0.0, "finished": True},
        {"prompt_token_ids": [3], "token_ids": [], "id": "2", "category": "", "temperature": 0.0, "finished": True},
    ]
    left_out = LeftOut()
    conversations, prompts = read_files([write_lines(tmp_path / "d.jsonl", rows)], tokenizer, left_out)
    assert len(conversations) == 1 and [prompt.category for prompt in prompts] == ["c", "", ""]
    assert tokenizer.decode(prompts[1].token_ids, False) == "<s>user\ny</s>\n<s>assistant\n"
    assert left_out.counts == {
        "unknown role 'wizard'; known are system, user, assistant, tool": 1, "no assistant turn to learn": 2, "no messages": 4, "a message without role and content": 1,
        "it holds a prompt of the evaluation suites": 3, "a message that is no valid Unicode: it holds half of a surrogate pair": 2,
    }  # fmt: skip
    assert "1 left out: unknown role 'wizard'; known are system, user, assistant, tool (first: d.jsonl, line 2)" in left_out.lines()


def test_a_tokenizer_without_a_chat_template(tmp_path):
    with pytest.raises(EagleError, match="no chat template"):
        read_files([write_lines(tmp_path / "d.jsonl", [{"messages": turns("a", "b")}])], tokenizer_of(tmp_path, None), LeftOut())


@pytest.mark.parametrize(
    "name, content, message",
    [("d.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2: not valid JSON"), ("d.jsonl", b"[1]\n", "line 1: expected a JSON object, got list"), ("d.jsonl", b"\xff\xfe", "cannot be read as text"),
     ("d.jsonl.gz", b"no gzip", "cannot be read as text"), ("d.jsonl.gz", gzip.compress(b"{}")[:10] + b"\xff" * 9, "cannot be read as text"), ("d.npz", b"no zip", "expected an .npz file"),
     ("d.npz", b"PK\x03\x04 cut", "expected an .npz file"), (None, b"", "no such data file"), ("d.jsonl", b'{"prompt_token_ids": [1], "token_ids": ["x"]}\n', "line 1: expected an answer as `eagle train` writes"),
     ("d.jsonl", b'{"prompt_token_ids": [9999], "token_ids": [1], "id": "", "category": "", "temperature": 0.0, "finished": true}\n', "line 1: holds token 9999, the tokenizer has")],
    ids=["json", "list", "bytes", "gzip", "deflate", "npz", "zip", "missing", "answer", "tokens"],
)  # fmt: skip
def test_damaged_files(tmp_path, name, content, message):
    path = tmp_path / (name or "nothing")
    if name:
        path.write_bytes(content)
    with pytest.raises(EagleError, match=message):
        read_files([path], tokenizer_of(tmp_path, CHATML), LeftOut())


def test_compressed_and_token_files(tmp_path):
    tokenizer = tokenizer_of(tmp_path, CHATML)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(json.dumps({"messages": turns("a", "b")}) + "\n\n")
    np.savez(tmp_path / "d.npz", tokens=np.arange(3, 13, dtype=np.uint16), offsets=np.array([0, 4, 10]), prompt_len=np.array([1, 6], dtype=np.int32))
    left_out = LeftOut()
    conversations, _ = read_files([tmp_path / "d.jsonl.gz", tmp_path / "d.npz"], tokenizer, left_out)
    assert [c.token_ids.tolist() for c in conversations[1:]] == [[3, 4, 5, 6]] and conversations[1].supervised.tolist() == [False, True, True, True]
    assert left_out.counts == {"no assistant turn to learn": 1}
    np.savez(tmp_path / "d.npz", tokens=np.array([9999]), offsets=np.array([0, 1]), prompt_len=np.array([0]))
    with pytest.raises(EagleError, match="holds token 9999, the tokenizer has"):
        read_files([tmp_path / "d.npz"], tokenizer, LeftOut())


def test_names_of_prompts_differ(tmp_path):
    """Rows without a good id, and files of one name: answers are found again by these names."""
    rows = [{"id": None, "prompt": "a"}, {"id": None, "prompt": "b"}, {"id": 7, "prompt": "c"}]
    (tmp_path / "other").mkdir()
    files = [write_lines(directory / "d.jsonl", rows) for directory in (tmp_path, tmp_path / "other")]
    _, prompts = read_files(files, tokenizer_of(tmp_path, CHATML), LeftOut())
    assert [prompt.id for prompt in prompts] == ["d.jsonl:None", "d.jsonl:None#2", "d.jsonl:7", "d.jsonl:None#3", "d.jsonl:None#4", "d.jsonl:7#2"]


@pytest.mark.parametrize("suite", ["mt_bench", "humaneval", "gsm8k"])
def test_evaluation_prompts_are_found(suite):
    """Every prompt, hidden in other text and written otherwise; unless it is too short to say so."""
    evaluation = EvaluationTexts()
    for prompt in load_prompts(suite):
        assert evaluation.occur_in(f"One moment! {prompt.turns[0].replace(' ', '  ').upper()} -- thanks")
    assert not evaluation.occur_in("Write a short poem about a bicycle that dreams of the sea, and explain what it means to you.")


def test_sampling_is_even_over_categories():
    prompts = [ChatPrompt(f"{category}{i}", category, []) for category, size in (("a", 100), ("b", 40), ("c", 5)) for i in range(size)]
    chosen = sample_by_category(prompts, 65, seed=1)
    assert {category: sum(p.category == category for p in chosen) for category in "abc"} == {"a": 30, "b": 30, "c": 5}
    assert len(set(p.id for p in chosen)) == 65 and chosen == sample_by_category(prompts, 65, seed=1) != sample_by_category(prompts, 65, seed=2)
    assert len(sample_by_category(prompts, None, 0)) == len(sample_by_category(prompts, 1000, 0)) == 145


def conversation(name: str, prompt: list[int], answer: list[int]) -> Conversation:
    return Conversation(name, np.array(prompt + answer, dtype=np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt))


def test_split_is_by_prompt_and_long_or_repeated_ones_are_left_out():
    generator = random.Random(0)
    conversations = [conversation(f"{i}-{j}", [i, i + 1], [generator.randrange(9) for _ in range(4)] + [j]) for i in range(200) for j in range(2)]
    left_out = LeftOut()
    data = build_data([*conversations, conversations[0], conversation("long", [1] * 30, [2])], 20, 0.2, left_out)
    assert left_out.counts == {"the same conversation stood there before": 1, "longer than max_length 20": 1}
    assert data.held_out.reshape(200, 2).all(1).sum() == data.held_out.sum() / 2 and 20 < data.held_out.sum() / 2 < 60
    # It does not depend on what else is there.
    fewer = build_data(conversations[:100], 20, 0.2, LeftOut())
    assert (fewer.held_out == data.held_out[:100]).all()
    with pytest.raises(EagleError, match="no conversation is left to train on:\n1 left out: longer than max_length 3"):
        build_data(conversations[:1], 3, 0.2, LeftOut())
    with pytest.raises(EagleError, match="one conversation is left"):
        build_data(conversations[:1], 20, 0.2, LeftOut())


def test_counts_are_of_what_is_trained_on(tmp_path):
    data = build_data([conversation(str(i), [i], [7, i % 2]) for i in range(50)], 20, 0.3, LeftOut())
    train = ~data.held_out
    assert data.count(60)[7] == train.sum() and data.count(60).sum() == 2 * train.sum()
    data.save(tmp_path / "data.npz")
    assert TokenData.load(tmp_path / "data.npz").fingerprint == data.fingerprint
    assert build_data([conversation("0", [0], [7, 1]), conversation("1", [1], [7, 1])], 20, 0.3, LeftOut()).fingerprint != data.fingerprint


@pytest.mark.parametrize("seed", range(5))
def test_packing_keeps_every_conversation_once(seed):
    generator = random.Random(seed)
    data = build_data([conversation(str(i), [i], [1] * generator.randrange(1, 30)) for i in range(300)], 64, 0.2, LeftOut())
    chosen = np.flatnonzero(~data.held_out)
    rows = pack(data, chosen, 64, random.Random(seed))
    assert sorted(number for row in rows for number in row) == chosen.tolist()
    filled = [sum(data.lengths[number] for number in row) for row in rows]
    assert max(filled) <= 64 and sum(filled) / (64 * len(rows)) > 0.9
    assert rows != pack(data, chosen, 64, random.Random(seed + 1)) and rows == pack(data, chosen, 64, random.Random(seed))


def test_acceptance_is_measured_on_prompts_of_all_files():
    data = build_data([conversation(f"{i}-{j}", [i // 100, i % 100], [7, j]) for i in range(400) for j in range(2)], 20, 0.2, LeftOut())
    prompts = measured_prompts(data, 16)
    assert len(set(map(tuple, prompts))) == 16 and {prompt[0] for prompt in prompts} == {0, 1, 2, 3} and prompts == measured_prompts(data, 16)
    held_out = {tuple(data.tokens[data.offsets[i] : data.offsets[i] + 2]) for i in np.flatnonzero(data.held_out)}
    assert set(map(tuple, prompts)) <= held_out and len(measured_prompts(data, 10**6)) == len(held_out)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_held_out_conversations_are_shared_out(num_processes):
    """Each stands with one process, once; every process has as many batches, as sharded weights need."""

    class NoStates:
        def of(self, token_ids):
            return [States(torch.zeros(len(ids), 2), torch.zeros(len(ids), 2), torch.zeros(len(ids), dtype=torch.int64)) for ids in token_ids]

    data = build_data([conversation(str(i), [i], [i] * (1 + i % 9)) for i in range(60)], 16, 0.3, LeftOut())
    shares = [list(Batches(data, NoStates(), max_length=16, batch_size=2, seed=0, process=i, num_processes=num_processes).held_out()) for i in range(num_processes)]
    assert len({len(share) for share in shares}) == 1
    learned = sorted(token for share in shares for batch in share for token in batch.tokens[batch.supervised].tolist())
    assert learned == sorted(data.tokens[np.repeat(data.held_out, data.lengths) & data.supervised].tolist())


def test_live_states_pad_little():
    """Conversations of a batch go through the target with others of like length: one long one does not make the short ones as long."""
    forwards = []

    class Recorded:
        def of(self, token_ids):
            forwards.append([len(ids) for ids in token_ids])
            return [States(torch.full((len(ids), 2), float(ids[0])), torch.zeros(len(ids), 2), torch.zeros(len(ids), dtype=torch.int64)) for ids in token_ids]

    data = build_data([conversation(str(i), [i], [7] * (2000 if i % 20 == 0 else 10 + i)) for i in range(60)], 2048, 0.1, LeftOut())
    batch = Batches(data, Recorded(), max_length=2048, batch_size=2, seed=0).collate([list(range(0, 20)), list(range(20, 40))])
    assert sum(len(lengths) * max(lengths) for lengths in forwards) < 1.5 * sum(map(sum, forwards)) and max(len(lengths) * max(lengths) for lengths in forwards) <= 4096
    first = batch.position_ids.eq(0) & (batch.documents >= 0)
    assert torch.equal(batch.states[first][:, 0].long(), batch.tokens[first])
