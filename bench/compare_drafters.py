"""Drafters of one target side by side: acceptance length, by depth and category, on the same prompts with the same tree, and whether every answer is that of plain decoding.

    python bench/compare_drafters.py --draft first=path/to/drafter --draft eagle1=... --draft eagle3=... [--suite mt_bench] [--limit 80] [--output FILE.json]

Acceptance does not depend on the machine, its load or the batch; speeds are those of `eagle bench`, not of this program.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from eagle_engine import Engine, SamplingParams
from eagle_engine.evaluation import SUITES, load_prompts


def measure(engine: Engine, prompts: list[list[int]], categories: list[str], plain: list[list[int]], max_tokens: int) -> dict:
    """Acceptance of one drafter over all prompts."""
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), progress=True)
    steps, emitted, reached = defaultdict(int), defaultdict(int), defaultdict(float)
    for output, category in zip(outputs, categories):
        steps[category] += output.stats.steps
        emitted[category] += len(output.token_ids) - 1 if output.stats.steps else 0
        for depth, share in enumerate(output.stats.acceptance_by_depth, start=1):
            reached[depth] += share * output.stats.steps
    total = sum(steps.values())
    return {
        "acceptance_length": sum(emitted.values()) / total,
        "acceptance_by_depth": [reached[depth] / total for depth in sorted(reached)],
        "by_category": {category: emitted[category] / steps[category] for category in sorted(steps) if steps[category]},
        "steps": total,
        "different_answers": sum(output.token_ids != answer for output, answer in zip(outputs, plain)),
    }


def table(results: dict[str, dict]) -> str:
    depths = max(len(result["acceptance_by_depth"]) for result in results.values())
    categories = sorted({category for result in results.values() for category in result["by_category"]})
    lines = ["| drafter | acceptance length | " + " | ".join(f"reached depth {depth}" for depth in range(1, depths + 1)) + " | different answers |", "| --- " * (depths + 3) + "|"]
    for name, result in results.items():
        shares = [f"{share:.3f}" for share in result["acceptance_by_depth"]] + [""] * (depths - len(result["acceptance_by_depth"]))
        lines.append(f"| {name} | {result['acceptance_length']:.2f} | " + " | ".join(shares) + f" | {result['different_answers']} |")
    lines += ["", "| drafter | " + " | ".join(categories) + " |", "| --- " * (len(categories) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{result['by_category'].get(category, 0):.2f}" for category in categories) + " |" for name, result in results.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--suite", choices=SUITES, default="mt_bench")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--max-depth", type=int, default=5)
    parser.add_argument("--num-nodes", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--draft-vocab", type=int, help="of EAGLE-1/2 drafters; default the whole vocabulary")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    common = dict(threads=args.threads, progress=False, max_batch_size=args.batch_size, max_model_len=2048)
    rows = load_prompts(args.suite, args.limit)
    plain_engine = Engine.from_pretrained(args.target, None, **common)
    prompts = [plain_engine.encode_chat([{"role": "user", "content": row.turns[0]}]) for row in rows]
    plain = [output.token_ids for output in plain_engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=args.max_new_tokens), progress=True)]
    results = {}
    for entry in args.draft:
        name, _, directory = entry.partition("=")
        own = "draft_vocab_size" in json.loads((Path(directory) / "config.json").read_text())
        engine = Engine.from_pretrained(
            args.target, directory, draft_vocab=None if own else args.draft_vocab, tree="dynamic", top_k=args.top_k, max_depth=args.max_depth, num_nodes=args.num_nodes, **common
        )
        results[name] = measure(engine, prompts, [row.category for row in rows], plain, args.max_new_tokens)
        print(f"{name}: {results[name]['acceptance_length']:.3f}", flush=True)
    setting = {name: getattr(args, name) for name in ("suite", "max_new_tokens", "top_k", "max_depth", "num_nodes", "draft_vocab")} | {"prompts": len(rows), "temperature": 0.0}
    print(table(results))
    if args.output is not None:
        args.output.write_text(json.dumps({"setting": setting, "drafters": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
