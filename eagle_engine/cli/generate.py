"""eagle generate: answers to one prompt, streaming, or to several."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from eagle_engine.cli.common import encode_turns, load_engine, note, print_json, prompt_set, sampling_params, show_progress
from eagle_engine.cli.output_json import output_as_json
from eagle_engine.errors import EagleError
from eagle_engine.outputs import RequestOutput, RequestStats
from eagle_engine.sampling_params import SamplingParams


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if params.logprobs is not None and not args.json:
        raise EagleError("--logprobs: they are part of --json output; add --json")
    names, texts = _prompts(args)
    engine = load_engine(args)
    encoded = [encode_turns(engine, [text], raw=args.raw, system=args.system) for text in texts]
    if len(texts) == 1 and params.n == 1 and not args.json:
        _stream(engine, encoded[0], params)
        return 0
    started = time.perf_counter()
    outputs = engine.generate(encoded, params, progress=show_progress())
    seconds = time.perf_counter() - started
    outputs = [replace(output, prompt=text) for output, text in zip(outputs, texts)]
    if args.json:
        print_json({"outputs": [{"id": name} | output_as_json(output) for name, output in zip(names, outputs)], "seconds": seconds})
    else:
        for name, output in zip(names, outputs):
            for answer in output.outputs:
                print(f"=== {name}{f', answer {answer.index + 1}' if params.n > 1 else ''}\n{answer.text}\n")
        sys.stdout.flush()
    failed = [(name, answer) for name, output in zip(names, outputs) for answer in output.outputs if answer.finish_reason == "error"]
    for name, answer in failed:
        note(f"eagle: error: prompt {name}: {answer.error}")
    note(summary(outputs, seconds))
    return 2 if failed else 0


def _prompts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Names and texts, from the command line, a prompt set or stdin."""
    if args.prompt and (args.prompts or args.suite):
        raise EagleError("give prompts on the command line or with --prompts or --suite, not both")
    if args.prompts or args.suite:
        prompts = prompt_set(args)
        return [prompt.id for prompt in prompts], [prompt.turns[0] for prompt in prompts]
    texts = args.prompt
    if not texts:
        if sys.stdin.isatty():
            note("type the prompt, end it with Ctrl-D")
        try:
            texts = [sys.stdin.read().removesuffix("\n")]
        except UnicodeDecodeError as error:
            raise EagleError(f"the prompt on stdin is not text: {error}") from error
    return [str(number) for number in range(1, len(texts) + 1)], texts


def _stream(engine, prompt: list[int], params: SamplingParams) -> None:
    started = time.perf_counter()
    tokens, stats = 0, RequestStats()
    try:
        for delta in engine.stream(prompt, params):
            tokens += len(delta.token_ids)
            stats = delta.stats or stats
            print(delta.text, end="", flush=True)
    finally:
        if tokens:
            print(flush=True)
    note(_line(tokens, time.perf_counter() - started, stats.steps, tokens - 1))


def summary(outputs: list[RequestOutput], seconds: float) -> str:
    """tokens, tokens per second, acceptance length over all answers."""
    answered = [answer for output in outputs for answer in output.outputs if answer.token_ids]
    tokens = sum(len(output.token_ids) for output in answered)
    return _line(tokens, seconds, sum(output.stats.steps for output in answered), tokens - len(answered))


def _line(tokens: int, seconds: float, steps: int, drafted: int) -> str:
    """drafted: tokens that steps emitted, those of the prefill left out."""
    length = f", acceptance length {drafted / steps:.2f}" if steps else ""
    return f"[{tokens} tokens, {tokens / seconds:.1f} tokens/s{length}]"
