"""Batches of growing size: plain decoding, a fixed tree of the default size and the adaptive tree, in turns on the same prompts; tokens per second of each over plain, and whether every answer is that of plain decoding.

    python bench/batch_scaling.py [--batch-sizes 1 2 4 8 16] [--rounds 6] [--queue 3] [--least 16] [--max-new-tokens 64] [--output FILE.json] [--plot FILE.png]
    python bench/batch_scaling.py --useless-drafter        # a drafter with random weights in place of the real one: what drafting costs where it cannot pay

A round is a queue of prompts, several for each place in the batch and --least in any case (a round of few tokens tells little on a shared machine), answered by every mode, in an order that rotates: when a request ends
the next takes its place. Greedy; end tokens are ignored, so that all answers are equally long; prompts are computed anew each time. Exit status 1 when tokens differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from random_models import random_tensors
from tqdm import tqdm

from eagle_engine import EagleConfig, EagleError, Engine, SamplingParams
from eagle_engine.cli.common import describe_models, output_file, shape_name
from eagle_engine.cli.plots import SUFFIXES, check_matplotlib
from eagle_engine.drafter import Drafter
from eagle_engine.evaluation import load_prompts
from eagle_engine.loading import load_models
from eagle_engine.target import TargetModel
from eagle_engine.tokenizer import Tokenizer

WARM_UP_TOKENS = 8
COLOURS = {"plain": "#57606a", "fixed": "#bf3989", "adaptive": "#1f6feb"}


@dataclass
class Measured:
    """One mode at one batch size; a number per round.

    seconds  wall time of all answers, prefill included
    prefill  of it
    shapes   steps by tree, over all rounds
    """

    tokens: int = 0
    answers: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    shapes: Counter = field(default_factory=Counter)

    def report(self, plain: Measured) -> dict:
        """Medians over the rounds; ratios are of times in the same round, on the same prompts, for equally many tokens."""
        decoding = [whole - prefill for whole, prefill in zip(self.seconds, self.prefill)]
        plain_decoding = [whole - prefill for whole, prefill in zip(plain.seconds, plain.prefill)]
        per_round, steps = self.tokens / len(self.seconds), sum(self.shapes.values())
        return {
            "tokens_per_second": per_round / statistics.median(self.seconds),
            "decode_tokens_per_second": (self.tokens - self.answers) / len(self.seconds) / statistics.median(decoding),
            "ratio": statistics.median(theirs / ours for theirs, ours in zip(plain.seconds, self.seconds)),
            "decode_ratio": statistics.median(theirs / ours for theirs, ours in zip(plain_decoding, decoding)),
            "acceptance_length": (self.tokens - self.answers) / self.steps,
            "shapes": {shape: count / steps for shape, count in self.shapes.most_common()},
            "seconds": self.seconds,
        }


def read_models(args: argparse.Namespace) -> tuple[TargetModel, Drafter, Tokenizer]:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    # With room for the largest tree.
    target, drafter, tokenizer = load_models(args.target, args.draft, config_of(args, 1), "auto", "auto", "auto", None, 0, False)
    if drafter is None:
        raise EagleError("batch_scaling compares drafting with plain decoding: --draft none leaves nothing to compare")
    return target, useless(drafter, target) if args.useless_drafter else drafter, tokenizer


def config_of(args: argparse.Namespace, batch: int) -> EagleConfig:
    return EagleConfig(tree="adaptive", max_batch_size=batch, max_model_len=args.max_model_len, enable_prefix_caching=False)


def make_engines(args: argparse.Namespace, models: tuple[TargetModel, Drafter, Tokenizer], batch: int) -> tuple[dict[str, Engine], str]:
    """Modes that share the target's weights, and the setting in words."""
    target, drafter, tokenizer = models
    config = config_of(args, batch)
    fixed = replace(config, tree="dynamic", top_k=None, max_depth=None, num_nodes=None)
    modes = {"plain": Engine(target, None, tokenizer, fixed)}
    if not args.useless_drafter:
        modes["fixed"] = Engine(target, drafter, tokenizer, fixed)
    modes["adaptive"] = Engine(target, drafter, tokenizer, config, progress=sys.stderr.isatty())
    return modes, describe_models(args, modes["adaptive"]) + (f"; fixed tree, top_k {fixed.top_k}, max_depth {fixed.max_depth}, num_nodes {fixed.num_nodes}" if "fixed" in modes else "")


def useless(drafter: Drafter, target: TargetModel) -> Drafter:
    """A drafter of the same shape, with random weights."""
    torch.manual_seed(0)
    tensors = random_tensors(drafter.config, target)
    if drafter.config.has_own_vocab:
        tensors["d2t"] = drafter.draft_to_target - torch.arange(drafter.vocab_size, device=target.device)
    ids = None if drafter.config.has_own_vocab else drafter.draft_to_target
    return Drafter(drafter.config, tensors, target, max_positions=target.max_positions, draft_vocab=ids)


def measure(modes: dict[str, Engine], prompts: list[list[int]], names: list[str], batch: int, count: int, rounds: int, max_tokens: int) -> tuple[dict[str, Measured], list[dict]]:
    """All modes on `rounds` queues of `count` prompts, one after the other through the prompts, from the first again after the last; the differences from plain decoding."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    measured, differences = {mode: Measured() for mode in modes}, []
    for engine in modes.values():
        engine.generate(prompts[:batch], replace(params, max_tokens=min(max_tokens, WARM_UP_TOKENS)))
    for number in tqdm(range(rounds), desc=f"batch {batch}", unit="round", disable=not sys.stderr.isatty(), leave=False):
        places = [(number * count + i) % len(prompts) for i in range(count)]
        order, answers = list(modes), {}
        order = order[number % len(order) :] + order[: number % len(order)]
        for mode in order:
            answers[mode] = run_once(modes[mode], [prompts[i] for i in places], params, measured[mode])
        for mode in modes:
            for i, plain, tokens in zip(places, answers["plain"], answers[mode]):
                if tokens != plain:
                    at = next((at for at, (a, b) in enumerate(zip(plain, tokens)) if a != b), min(len(plain), len(tokens)))
                    differences.append({"batch": batch, "round": number, "mode": mode, "prompt": names[i], "token": at})
    return measured, differences


def run_once(engine: Engine, prompts: list[list[int]], params: SamplingParams, into: Measured) -> list[list[int]]:
    """One queue; its answers."""
    sizes, prefill = engine.sizes, engine.timer.seconds["prefill"]
    runs_before = dict(sizes.num_steps) if sizes is not None else {}
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    into.seconds.append(time.perf_counter() - started)
    into.prefill.append(engine.timer.seconds["prefill"] - prefill)
    for output in outputs:
        if output.error is not None:
            raise EagleError(output.error)
        into.tokens += len(output.token_ids)
        into.answers += 1
        into.steps += output.stats.steps
    runs = {index: count - runs_before[index] for index, count in sizes.num_steps.items()} if sizes is not None else {0: 1}
    for index, count in runs.items():
        if count > 0:
            into.shapes[shape_name(engine.shapes[index].max_depth, engine.shapes[index].num_nodes)] += count
    return [output.token_ids for output in outputs]


def report(measured: dict[int, dict[str, Measured]], differences: list[dict]) -> dict:
    batches = []
    for batch, modes in measured.items():
        rows = {mode: one.report(modes["plain"]) for mode, one in modes.items()}
        best = max((mode for mode in rows if mode != "adaptive"), key=lambda mode: rows[mode]["ratio"])
        each = [theirs / ours for theirs, ours in zip(modes[best].seconds, modes["adaptive"].seconds)]
        quartiles = statistics.quantiles(each, method="inclusive") if len(each) > 1 else each * 3
        batches.append({"batch": batch, "modes": rows, "best": best, "adaptive_over_best": statistics.median(each), "middle_half": [quartiles[0], quartiles[2]]})
    return {"batches": batches, "least_adaptive_over_best": min(row["adaptive_over_best"] for row in batches), "differences": differences}


def table(result: dict) -> str:
    modes = list(result["batches"][0]["modes"])
    lines = [f"{'batch':>5}  {'mode':<10}{'tokens/s':>10}{'over plain':>12}{'decoding':>10}{'acceptance':>12}   steps by tree"]
    for row in result["batches"]:
        for mode in modes:
            one = row["modes"][mode]
            shapes = "; ".join(f"{shape} {share:.0%}" for shape, share in list(one["shapes"].items())[:4])
            lines.append(f"{row['batch']:>5}  {mode:<10}{one['tokens_per_second']:>10.1f}{one['ratio']:>12.3f}{one['decode_ratio']:>10.3f}{one['acceptance_length']:>12.2f}   {shapes}")
    best = "plain and fixed" if "fixed" in modes else "plain"
    each = ", ".join(f"batch {row['batch']}: {row['adaptive_over_best']:.3f} ({row['middle_half'][0]:.3f} to {row['middle_half'][1]:.3f})" for row in result["batches"])
    lines += ["", "tokens/s: prefill included; over plain: medians of ratios in one round, then without the prefill"]
    lines.append(f"adaptive over the best of {best}, likewise, and the middle half of the rounds: {each}; least {result['least_adaptive_over_best']:.3f}")
    differences = result["differences"]
    lines.append(f"{len(differences)} answers differ from plain decoding" if differences else "every token is that of plain decoding")
    lines += [f"  batch {one['batch']}, round {one['round']}, {one['mode']}, prompt {one['prompt']}: token {one['token']} is the first" for one in differences]
    return "\n".join(lines)


def plot(result: dict, file: Path) -> None:
    """Tokens per second, and the ratio to plain decoding, by batch size; file: .png or .svg."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eagle", "font.size": 10}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(result["setting"]["models"], fontsize=8)
        batches = [row["batch"] for row in result["batches"]]
        for axes, value, label in zip(figure.subplots(1, 2), ("tokens_per_second", "ratio"), ("tokens per second", "over plain decoding")):
            for mode in result["batches"][0]["modes"]:
                axes.plot(range(len(batches)), [row["modes"][mode][value] for row in result["batches"]], marker="o", color=COLOURS[mode], label=mode)
            axes.set_xticks(range(len(batches)), batches)
            axes.set(xlabel="batch size", ylabel=label)
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=8)
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", default="mt_bench", metavar="SUITE|FILE", help="default: %(default)s")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="default: 1 2 4 8 16")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="queues for each batch size (default: %(default)s)")
    parser.add_argument("--queue", type=int, default=3, metavar="N", help="prompts of a round for each place in the batch (default: %(default)s)")
    parser.add_argument("--least", type=int, default=16, metavar="N", help="and at least so many (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, default=1024, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--useless-drafter", action="store_true", help="a drafter with random weights, of the real one's shape; adaptive against plain alone")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")
    parser.add_argument("--output", metavar="FILE.json", help="also write the JSON to a file")
    parser.add_argument("--plot", metavar="FILE", help="draw it to a .png or .svg file")
    args = parser.parse_args()
    if min(args.batch_sizes) < 1 or args.rounds < 1 or args.queue < 1 or args.least < 1 or args.max_new_tokens < 2:
        parser.error("--batch-sizes, --rounds, --queue and --least must be at least 1, --max-new-tokens 2")
    try:
        output, picture = (None if name is None else output_file(option, name, kinds) for option, name, kinds in (("--output", args.output, (".json",)), ("--plot", args.plot, SUFFIXES)))
        if picture is not None:
            check_matplotlib()
        rows = load_prompts(args.prompts, args.limit)
        models = read_models(args)
        tokenizer = models[2]
        prompts = [tokenizer.encode_chat([{"role": "user", "content": row.turns[0]}]) if tokenizer.chat_template is not None else tokenizer.encode(row.turns[0]) for row in rows]
        if max(map(len, prompts)) + args.max_new_tokens > args.max_model_len:
            raise EagleError(f"--max-model-len {args.max_model_len} would cut answers: the longest prompt has {max(map(len, prompts))} tokens, and answers have {args.max_new_tokens}")
        measured, differences = {}, []
        for batch in sorted(set(args.batch_sizes)):
            modes, described = make_engines(args, models, batch)
            measured[batch], found = measure(modes, prompts, [row.id for row in rows], batch, max(args.queue * batch, args.least), args.rounds, args.max_new_tokens)
            differences += found
    except EagleError as error:
        parser.error(str(error))
    setting = {"models": described + (", random weights" if args.useless_drafter else ""), "prompts": args.prompts, "num_prompts": len(rows)} | {name: getattr(args, name) for name in ("rounds", "queue", "least", "max_new_tokens", "useless_drafter")}
    result = {"setting": setting} | report(measured, differences)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    if picture is not None:
        plot(result, picture)
    print(json.dumps(result) if args.json else f"{setting['models']}; {len(rows)} prompts of {args.prompts}, {args.max_new_tokens} tokens each, {args.rounds} rounds\n\n{table(result)}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
