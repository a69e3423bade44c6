"""From files to token ids with a mask of the assistant's tokens."""

from __future__ import annotations

import gzip
import json
import random
import re
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle_engine.errors import EagleError
from eagle_engine.evaluation import SUITES, load_prompts
from eagle_engine.tokenizer import Tokenizer
from eagle_engine.training.answers import Answer, ChatPrompt

ROLES = ("system", "user", "assistant", "tool")
_SHINGLE = 13  # words in a row that count as a copy of an evaluation prompt
_SHORTEST_TURN = 5  # an evaluation prompt of so many words counts as copied when it occurs as a whole

_EVALUATION = "it holds a prompt of the evaluation suites"
_NOTHING_TO_LEARN = "no assistant turn to learn"
_MISSED_TURN = "an assistant's turn that the chat template writes otherwise than after its generation prompt, or changes once the conversation goes on; the target's own answer to a prompt has no such turn"


class Conversation(NamedTuple):
    """token_ids int32 [n]; supervised bool [n], the assistant's tokens, an end token with them."""

    id: str
    token_ids: np.ndarray
    supervised: np.ndarray


class LeftOut:
    """Conversations that could not be used, by reason; each reason with the first place where it was met."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    def lines(self) -> list[str]:
        return [f"{count} left out: {reason} (first: {self.first[reason]})" for reason, count in self.counts.most_common()]


def read_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """("file, line n", object) of a .jsonl or .jsonl.gz file."""
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8")
    try:
        with opened as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise EagleError(f"{path}, line {number}: not valid JSON: {error}") from error
                if not isinstance(row, dict):
                    raise EagleError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
                yield f"{path.name}, line {number}", row
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise EagleError(f"{path}: cannot be read as text: {error}") from error


def messages_of(row: dict) -> list[dict] | None:
    """The conversation of a row: "messages", or "prompt" or "turns" (only the first turn: later ones answer what the target has not said yet) as a user's message."""
    if "messages" in row:
        return row["messages"]
    if "prompt" in row:
        return [{"role": "user", "content": row["prompt"]}]
    turns = row.get("turns")
    return [{"role": "user", "content": turns[0]}] if isinstance(turns, list) and turns else None


def problem_of(messages: object) -> str | None:
    """What is wrong with a list of messages, or None."""
    if not isinstance(messages, list) or not messages:
        return "no messages"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
            return "a message without role and content"
        if message["role"] not in ROLES:
            return f"unknown role {message['role']!r}; known are {', '.join(ROLES)}"
        if re.search("[\ud800-\udfff]", message["content"]):
            return "a message that is no valid Unicode: it holds half of a surrogate pair"
    return None


class Encoded(NamedTuple):
    """token_ids, supervised [n]; num_missed: assistant's messages that have no span and are not learned."""

    token_ids: list[int]
    supervised: list[bool]
    num_missed: int


def encode_conversation(tokenizer: Tokenizer, messages: list[dict]) -> Encoded:
    """Token ids of a whole conversation, and which of them the assistant says.

    The spans come from the chat template itself: what message i adds to the text of the messages before it with the generation prompt is what the assistant says there. Its last token is the first
    end token of the span; what a template writes after it, such as a line end, nobody ever generates. An assistant's message whose text depends on later messages, or does not begin with the generation
    prompt, has no such span and is not learned.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    spans, num_missed = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        before = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
        if text.startswith(after) and after.startswith(before):
            spans.append((len(before), len(after)))
        else:
            num_missed += 1
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    supervised = [False] * len(encoding.ids)
    ends = set(tokenizer.eos_token_ids)
    span, ended = 0, False
    for i, ((start, stop), token) in enumerate(zip(encoding.offsets, encoding.ids)):
        # Llama-3's tokenizer takes the spaces off its offsets: a token of spaces alone lies, empty, where it ends.
        while span < len(spans) and start >= spans[span][1] < stop:
            span, ended = span + 1, False
        if span < len(spans) and not ended and start >= spans[span][0] < stop:
            supervised[i] = True
            ended = token in ends
    return Encoded(encoding.ids, supervised, num_missed)


class EvaluationTexts:
    """Whether a text holds a prompt of the evaluation suites: one of its runs of 13 words, or a whole turn of 5 to 12 words."""

    def __init__(self) -> None:
        self._shingles: set[tuple[str, ...]] = set()
        self._turns: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        for suite in SUITES:
            for prompt in load_prompts(suite):
                for turn in prompt.turns:
                    words = _words(turn)
                    if len(words) >= _SHINGLE:
                        self._shingles.update(_runs(words, _SHINGLE))
                    elif len(words) >= _SHORTEST_TURN:
                        self._turns[len(words)].add(tuple(words))

    def occur_in(self, text: str) -> bool:
        words = _words(text)
        return any(run in self._shingles for run in _runs(words, _SHINGLE)) or any(run in turns for size, turns in self._turns.items() for run in _runs(words, size))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _runs(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(size)))


def read_files(paths: Sequence[Path], tokenizer: Tokenizer, left_out: LeftOut) -> tuple[list[Conversation], list[ChatPrompt]]:
    """Conversations that have answers, and prompts that want one. Those that cannot be used are counted in left_out."""
    evaluation = EvaluationTexts()
    conversations: list[Conversation] = []
    prompts: list[ChatPrompt] = []
    # Answers go by the names of their prompts, so those must differ, also across files of one name.
    names: Counter[str] = Counter()
    for path in paths:
        if not path.is_file():
            raise EagleError(f"{path}: no such data file")
        if path.suffix == ".npz":
            conversations += _read_tokens(path, tokenizer, evaluation, left_out)
            continue
        for where, row in read_rows(path):
            name = f"{path.name}:{row.get('id', where)}"
            names[name] += 1
            if names[name] > 1:
                name += f"#{names[name]}"
            if "prompt_token_ids" in row and "token_ids" in row:
                conversation = conversation_of(_read_answer(row, where))
                if _is_usable(conversation, where, tokenizer, evaluation, left_out):
                    conversations.append(conversation)
                continue
            messages = messages_of(row)
            problem = problem_of(messages)
            if problem is None and evaluation.occur_in("\n".join(message["content"] for message in messages)):
                problem = _EVALUATION
            if problem is not None:
                left_out.add(problem, where)
                continue
            try:
                if messages[-1]["role"] in ("user", "tool"):
                    prompts.append(ChatPrompt(name, str(row.get("category", "")), tokenizer.encode_chat(messages)))
                    continue
                token_ids, supervised, num_missed = encode_conversation(tokenizer, messages)
            except EagleError as error:
                if tokenizer.chat_template is None:
                    raise
                left_out.add(str(error), where)
                continue
            for _ in range(num_missed):
                left_out.add(_MISSED_TURN, where)
            if not any(supervised):
                left_out.add(_NOTHING_TO_LEARN, where)
                continue
            conversations.append(Conversation(name, np.array(token_ids, dtype=np.int32), np.array(supervised)))
    return conversations, prompts


def conversation_of(answer: Answer) -> Conversation:
    prompt, ids = answer.prompt_token_ids, answer.token_ids
    return Conversation(answer.id, np.array(prompt + ids, dtype=np.int32), np.arange(len(prompt) + len(ids)) >= len(prompt))


def _read_answer(row: dict, where: str) -> Answer:
    """A line of another run's answers.jsonl."""
    lists = [row["prompt_token_ids"], row["token_ids"]]
    if sorted(row) != sorted(Answer._fields) or not all(isinstance(ids, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids) for ids in lists):
        raise EagleError(f"{where}: expected an answer as `eagle train` writes them to answers.jsonl, with {', '.join(Answer._fields)}, the ids as lists of whole numbers of at least 0")
    return Answer(**row)


def _is_usable(conversation: Conversation, where: str, tokenizer: Tokenizer, evaluation: EvaluationTexts, left_out: LeftOut) -> bool:
    """Whether a conversation that came as token ids can be learned from; an error when they are not this tokenizer's."""
    ids, supervised = conversation.token_ids, conversation.supervised
    for token in (int(ids.min(initial=0)), int(ids.max(initial=0))):
        if not 0 <= token < tokenizer.vocab_size:
            raise EagleError(f"{where}: holds token {token}, the tokenizer has {tokenizer.vocab_size}")
    if evaluation.occur_in(tokenizer.decode(ids[~supervised].tolist())):
        left_out.add(_EVALUATION, where)
    elif not supervised.any():
        left_out.add(_NOTHING_TO_LEARN, where)
    else:
        return True
    return False


def _read_tokens(path: Path, tokenizer: Tokenizer, evaluation: EvaluationTexts, left_out: LeftOut) -> list[Conversation]:
    """A file of token ids: tokens [total], offsets [n + 1], prompt_len [n]; the answer of chat i is tokens[offsets[i] + prompt_len[i] : offsets[i + 1]]."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, offsets, prompt_len = (file[name] for name in ("tokens", "offsets", "prompt_len"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise EagleError(f"{path}: expected an .npz file with tokens, offsets and prompt_len: {error}") from error
    lengths = np.diff(offsets)
    if len(offsets) != len(prompt_len) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or (lengths < prompt_len).any() or (prompt_len < 0).any():
        raise EagleError(f"{path}: offsets and prompt_len do not fit {len(tokens)} tokens")
    conversations = []
    for i, length in enumerate(lengths):
        ids = tokens[offsets[i] : offsets[i + 1]].astype(np.int64)
        conversation = Conversation(f"{path.name}:{i}", ids, np.arange(length) >= prompt_len[i])
        if _is_usable(conversation, f"{path.name}, chat {i}", tokenizer, evaluation, left_out):
            conversations.append(conversation._replace(token_ids=ids.astype(np.int32)))
    return conversations


def sample_by_category(prompts: Sequence[ChatPrompt], count: int | None, seed: int) -> list[ChatPrompt]:
    """At most `count` prompts, in random order, as evenly from the categories as they allow: a category that has fewer than its share leaves the rest to the others."""
    by_category: dict[str, list[ChatPrompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    generator = random.Random(seed)
    for group in by_category.values():
        generator.shuffle(group)
    chosen: list[ChatPrompt] = []
    room = len(prompts) if count is None else min(count, len(prompts))
    groups = sorted(by_category.items(), key=lambda item: (len(item[1]), item[0]))
    for i, (_, group) in enumerate(groups):
        take = min(len(group), (room - len(chosen)) // (len(groups) - i))
        chosen += group[:take]
    generator.shuffle(chosen)
    return chosen
