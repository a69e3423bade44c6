"""Acceptance length in long conversations, for windows of the drafter's attention: at 2k, 4k and 8k tokens by default.

    python bench/long_context.py [--draft eagle1 --draft eagle3] [--windows 0 512 1024 2048] [--lengths 2048 4096 8000] [--conversations 3] [--output FILE.json]

The conversations are the target's own: it answers the questions of MT-bench one after the other, the conversation growing, until the longest length is reached. At each length the next questions are then
answered once per window. Acceptance does not depend on the machine or its load; every answer is compared with that of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eagle_engine import EagleConfig, Engine, SamplingParams
from eagle_engine.drafter import Drafter
from eagle_engine.evaluation import load_prompts


def grow_conversation(engine: Engine, questions: list[str], length: int, answer_tokens: int) -> list[dict[str, str]]:
    """Messages of a conversation of `length` tokens or more, ending with an answer."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": engine.chat(messages, SamplingParams(temperature=0.0, max_tokens=answer_tokens)).text})
        if len(engine.encode_chat(messages)) >= length:
            return messages
    raise SystemExit(f"{len(questions)} questions do not fill {length} tokens")


def prompts_at(engine: Engine, messages: list[dict[str, str]], questions: list[str], length: int) -> list[list[int]]:
    """One prompt per question: the beginning of the conversation, as many whole turns as fit in `length` tokens, and the question."""
    turns = 0
    while turns + 2 <= len(messages) and len(engine.encode_chat(messages[: turns + 2])) <= length:
        turns += 2
    return [engine.encode_chat([*messages[:turns], {"role": "user", "content": question}]) for question in questions]


def measure(target: Engine, drafter: Drafter, config: EagleConfig, window: int, prompts: list[list[int]], plain: list[list[int]], params: SamplingParams) -> dict:
    """Acceptance of one drafter with one window over the prompts of one length."""
    drafter.window = window
    engine = Engine(target.models.target, drafter, target.tokenizer, config)
    outputs = engine.generate(prompts, params)
    steps = sum(output.stats.steps for output in outputs)
    return {
        "window": window,
        "acceptance_length": sum(len(output.token_ids) - 1 for output in outputs) / steps if steps else 0.0,
        "steps": steps,
        "different_answers": sum(output.token_ids != answer for output, answer in zip(outputs, plain)),
    }


def run(target: Engine, drafters: dict[str, Drafter], args: argparse.Namespace) -> dict:
    """Results by length, drafter and window."""
    base = dict(max_model_len=target.max_model_len, max_batch_size=1, page_size=target.config.page_size)
    config = EagleConfig(**base, tree="dynamic", top_k=args.top_k, max_depth=args.max_depth, num_nodes=args.num_nodes)
    questions = [prompt.turns[0] for prompt in load_prompts("mt_bench")]
    asked, told = questions[: args.questions], questions[args.questions :]
    writer = Engine(target.models.target, next(iter(drafters.values())), target.tokenizer, config) if drafters else target
    share = len(told) // args.conversations
    conversations = [grow_conversation(writer, told[i * share : (i + 1) * share] + told[: i * share], max(args.lengths), args.answer_tokens) for i in range(args.conversations)]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens)
    results = []
    for length in args.lengths:
        prompts = [prompt for messages in conversations for prompt in prompts_at(target, messages, asked, length)]
        plain = [output.token_ids for output in target.generate(prompts, params)]
        rows = [{"drafter": name} | measure(target, drafter, config, window, prompts, plain, params) for name, drafter in drafters.items() for window in args.windows]
        results.append({"length": length, "prompt_tokens": [len(prompt) for prompt in prompts], "rows": rows})
        for row in rows:
            print(f"{length:>6}  {row['drafter']:<10} window {row['window'] or 'all':>5}  acceptance length {row['acceptance_length']:.3f}  {row['steps']} steps  {row['different_answers']} different answers", flush=True)
    setting = {name: getattr(args, name) for name in ("max_new_tokens", "top_k", "max_depth", "num_nodes", "conversations", "questions", "answer_tokens")}
    return {"setting": setting | {"temperature": 0.0}, "results": results}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", action="append", metavar="NAME|DIR", help="default: both of the demo target")
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 512, 1024, 2048])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--questions", type=int, default=3, help="asked at each length, in each conversation")
    parser.add_argument("--answer-tokens", type=int, default=384, help="most tokens of an answer while a conversation grows")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--max-depth", type=int, default=5)
    parser.add_argument("--num-nodes", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    return parser


def main() -> None:
    args = parser().parse_args()
    tree = dict(tree="dynamic", top_k=args.top_k, max_depth=args.max_depth, num_nodes=args.num_nodes)
    engines = {name: Engine.from_pretrained(args.target, name, threads=args.threads, progress=False, max_batch_size=1, **tree) for name in args.draft or ["eagle1", "eagle3"]}
    drafters = {name: engine.models.drafter for name, engine in engines.items()}
    target = next(iter(engines.values())).plain()
    result = run(target, drafters, args)
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
