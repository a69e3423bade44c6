"""eagle chat: a conversation on the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing

from eagle_engine.cli.common import encode_turns, load_engine, note, sampling_params
from eagle_engine.errors import EagleError


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    engine = load_engine(args)
    if engine.tokenizer.chat_template is None:
        raise EagleError("this model has no chat template; use eagle generate --raw")
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  (line editing and history for input())
        except ImportError:
            pass
        note("/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer")
    turns: list[str] = []
    while (line := _read_line(args.json)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            turns = []
            continue
        if line.startswith("/"):
            note("commands are /reset and /exit")
            continue
        if not line:
            continue
        try:
            prompt = encode_turns(engine, [*turns, line], raw=False, system=args.system)
            answer = _answer(engine, prompt, params, args.json)
        except EagleError as error:
            note(f"eagle: error: {error}" + ("; /reset starts over" if turns else ""))
            continue
        turns += [line, answer]
    return 0


def _read_line(json_output: bool) -> str | None:
    """The next line without surrounding blanks; None at the end of input."""
    try:
        if json_output or not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.strip() if line else None
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as error:
        raise EagleError(f"the input is not text: {error}") from error


def _answer(engine, prompt: list[int], params, json_output: bool) -> str:
    """Stream one answer; what there is of it when Ctrl-C stops it."""
    started = time.perf_counter()
    text, tokens, reason = "", [], "abort"
    try:
        with closing(engine.stream(prompt, params)) as deltas:
            for delta in deltas:
                text += delta.text
                tokens += delta.token_ids
                reason = delta.finish_reason or reason
                if not json_output:
                    print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        note("[stopped]")
    seconds = time.perf_counter() - started
    if json_output:
        print(json.dumps({"text": text, "token_ids": tokens, "finish_reason": reason, "tokens_per_second": len(tokens) / seconds}, ensure_ascii=False), flush=True)
    else:
        print(flush=True)
    return text
