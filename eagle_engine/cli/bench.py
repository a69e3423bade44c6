"""eagle bench: plain and speculative decoding in one run, prompt by prompt in turns, so that a machine that slows down slows both."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from eagle_engine.calibration import Calibration
from eagle_engine.cli.baseline import TransformersBaseline
from eagle_engine.cli.common import describe_models, describe_sampling, encode_turns, load_engine, note, output_file, print_json, prompt_set, sampling_params, show_progress
from eagle_engine.cli.plots import SUFFIXES, check_matplotlib, number, plot_calibration
from eagle_engine.engine import Engine
from eagle_engine.errors import EagleError
from eagle_engine.outputs import RequestOutput
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.step import PHASES


@dataclass
class Measured:
    """Sums over the prompts that were answered; times are wall-clock around whole answers, prefill included."""

    tokens: int = 0
    seconds: float = 0.0
    answers: int = 0
    steps: int = 0
    reached: list[float] = field(default_factory=list)  # steps whose accepted path reached depth 1, 2, ...
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, outputs: list[RequestOutput], seconds: float, phases: dict[str, float]) -> None:
        self.seconds += seconds
        for output in outputs:
            self.tokens += len(output.token_ids)
            self.answers += 1
            self.steps += output.stats.steps
            by_depth = output.stats.acceptance_by_depth
            self.reached.extend([0.0] * (len(by_depth) - len(self.reached)))
            for depth, share in enumerate(by_depth):
                self.reached[depth] += share * output.stats.steps
        for phase, spent in phases.items():
            self.phases[phase] += spent

    def summary(self) -> dict:
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "steps": self.steps,
            "acceptance_length": (self.tokens - self.answers) / self.steps if self.steps else 0.0,
            "acceptance_by_depth": [count / self.steps for count in self.reached],
        }

    def report(self) -> dict:
        decoding = self.seconds - self.phases["prefill"]
        shares = {phase: spent / self.seconds for phase, spent in self.phases.items()}
        return self.summary() | {
            "decode_tokens_per_second": (self.tokens - self.answers) / decoding if self.tokens > self.answers else 0.0,
            "time_share": shares | {"other": max(0.0, 1.0 - sum(shares.values()))},
        }


class MeasuredByCategory:
    """Sums over all prompts and over those of each category. The time of a batch is shared out among its answers by their tokens: exact where prompts are answered one at a time."""

    def __init__(self) -> None:
        self.all = Measured()
        self.categories: dict[str, Measured] = {}

    def add(self, outputs: list[RequestOutput], categories: list[str], seconds: float, phases: dict[str, float]) -> None:
        self.all.add(outputs, seconds, phases)
        tokens = sum(len(output.token_ids) for output in outputs)
        for output, category in zip(outputs, categories):
            self.categories.setdefault(category, Measured()).add([output], seconds * len(output.token_ids) / tokens, {})


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, default_seed=0)
    if args.baseline and args.batch_size > 1:
        raise EagleError("--baseline transformers answers one prompt at a time: use it with --batch-size 1")
    plot = check_calibration(args)
    prompts = prompt_set(args)
    engine = load_engine(args)
    if (args.calibration or plot) and engine.captures_steps:
        raise EagleError("--calibration looks into every step, and a captured one runs out of sight: add --enforce-eager")
    speculative_engine = engine if engine.models.drafter is not None else None
    plain_engine = engine if speculative_engine is None else engine.plain()
    encoded = [encode_turns(engine, [prompt.turns[0]], raw=args.raw, system=args.system) for prompt in prompts]
    groups = [range(start, min(start + args.batch_size, len(encoded))) for start in range(0, len(encoded), args.batch_size)]
    setting = f"{describe_models(args, engine)}; {describe_sampling(params)}; {len(prompts)} prompts, at most {params.max_tokens} tokens each"
    note(setting)
    note("memory: " + ", ".join(f"{name.replace('_', ' ')} {size / 1e6:.0f} MB" for name, size in engine.memory_bytes.items()))

    plain, speculative, baseline = MeasuredByCategory(), MeasuredByCategory(), Measured()
    failures: list[tuple[str, str]] = []
    num_different = 0
    with ExitStack() as stack:
        reference = stack.enter_context(TransformersBaseline(args, str(engine.models.target.dtype), torch.get_num_threads(), engine.models.target.device.type)) if args.baseline else None
        warm_up = SamplingParams(temperature=0.0, max_tokens=min(params.max_tokens, 16), ignore_eos=True)
        for one in filter(None, (plain_engine, speculative_engine)):
            one.generate([encoded[0]], warm_up)
        if reference is not None:
            reference.generate(encoded[0], warm_up.max_tokens)
        for number, group in enumerate(tqdm(groups, desc="measuring", unit="prompt" if args.batch_size == 1 else "batch", disable=not show_progress(), leave=False)):
            batch, categories = [encoded[i] for i in group], [prompts[i].category for i in group]
            answers: dict[str, list[RequestOutput]] = {}
            turns: list[Callable[[], None]] = [lambda: answers.update(plain=_measure(plain_engine, batch, categories, params, plain))]
            if speculative_engine is not None:
                turns.append(lambda: answers.update(speculative=_measure(speculative_engine, batch, categories, params, speculative)))
            for take in turns if number % 2 == 0 else reversed(turns):
                take()
            failures += [(prompts[i].id, output.error) for i, output in zip(group, answers["plain"]) if output.error is not None]
            if speculative_engine is not None:
                num_different += sum(a.token_ids != b.token_ids for a, b in zip(answers["plain"], answers["speculative"]))
            if reference is not None and answers["plain"][0].token_ids:
                baseline.seconds += reference.generate(batch[0], len(answers["plain"][0].token_ids))
                baseline.tokens += len(answers["plain"][0].token_ids)
    for name, error in failures:
        note(f"eagle: error: prompt {name}: {error}")
    if plain.all.tokens == 0:
        raise EagleError("none of the prompts could be answered")
    result: dict = {"setting": setting, "plain": plain.all.report()}
    if speculative_engine is not None:
        result["speculative"] = speculative.all.report()
        result["speedup"] = result["speculative"]["tokens_per_second"] / result["plain"]["tokens_per_second"]
        result["different_answers"] = num_different
    if reference is not None:
        result["transformers"] = {"tokens_per_second": baseline.tokens / baseline.seconds, "tokens": baseline.tokens, "seconds": baseline.seconds}
        result["plain_over_transformers"] = result["plain"]["tokens_per_second"] / result["transformers"]["tokens_per_second"]
    result["categories"] = _by_category(plain, speculative)
    if args.calibration or plot:
        result["calibration"] = _calibrate(speculative_engine, [[encoded[i] for i in group] for group in groups], params)
    result["prompts"] = len(prompts) - len(failures)
    result["peak_memory_bytes"] = peak_memory_bytes()
    if args.json:
        print_json(result)
    else:
        _print_table(result, exact=args.acceptance == "exact" or params.temperature == 0)
    if plot:
        sys.stdout.flush()  # a plot that cannot be written must not cost the figures
        plot_calibration(result["calibration"], result["speculative"]["acceptance_by_depth"], setting, plot)
        note(f"plot: {plot}")
    return 2 if failures else 0


def check_calibration(args: argparse.Namespace) -> Path | None:
    """The file of --plot, None without; a mistake in what was asked for is told before anything is loaded."""
    if not (args.calibration or args.plot):
        return None
    option = "--calibration" if args.calibration else "--plot"
    if args.draft == "none":
        raise EagleError(f"{option} measures a drafter: --draft none leaves nothing to measure")
    if args.acceptance == "rejection":
        raise EagleError(f"{option} compares drafts with the token that the target chose; acceptance rejection does not choose one: use exact")
    if not args.plot:
        return None
    file = output_file("--plot", args.plot, SUFFIXES)
    check_matplotlib()
    return file


def _measure(engine: Engine, prompts: list[list[int]], categories: list[str], params: SamplingParams, into: MeasuredByCategory) -> list[RequestOutput]:
    before = dict(engine.timer.seconds)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    answered = [(output, category) for output, category in zip(outputs, categories) if output.error is None]
    if answered:
        phases = {phase: spent - before[phase] for phase, spent in engine.timer.seconds.items()}
        into.add([output for output, _ in answered], [category for _, category in answered], seconds, phases)
    return outputs


def _by_category(plain: MeasuredByCategory, speculative: MeasuredByCategory) -> dict[str, dict]:
    """Per category: prompts that were answered, plain and speculative decoding, the ratio of their tokens per second."""
    result = {}
    for name, measured in plain.categories.items():
        result[name] = {"prompts": measured.answers, "plain": measured.summary()}
        if name in speculative.categories:
            other = speculative.categories[name].summary()
            result[name] |= {"speculative": other, "speedup": other["tokens_per_second"] / result[name]["plain"]["tokens_per_second"]}
    return result


def _calibrate(engine: Engine, batches: list[list[list[int]]], params: SamplingParams) -> dict:
    """Answer the prompts once more, not timed, and look at every draft."""
    calibration = Calibration()
    with engine.observing(calibration.observe):
        for batch in tqdm(batches, desc="calibration", unit="batch", disable=not show_progress(), leave=False):
            engine.generate(batch, params)
    return calibration.report()


def peak_memory_bytes() -> int:
    """Greatest resident size of this process: both engines, which share their weights; transformers runs in another process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print_table(result: dict, exact: bool) -> None:
    columns = [phase for phase in (*PHASES, "other") if any(result[name]["time_share"][phase] > 0 for name in ("plain", "speculative") if name in result)]
    print(f"{'':<14}{'tokens':>8}{'tokens/s':>10}{'decode':>9}   " + "".join(f"{name:>9}" for name in columns))
    for name in ("plain", "speculative"):
        if name in result:
            row = result[name]
            shares = "".join(f"{row['time_share'][column]:>9.0%}" for column in columns)
            print(f"{name:<14}{row['tokens']:>8}{row['tokens_per_second']:>10.1f}{row['decode_tokens_per_second']:>9.1f}   {shares}")
    if "transformers" in result:
        row = result["transformers"]
        print(f"{'transformers':<14}{row['tokens']:>8}{row['tokens_per_second']:>10.1f}")
    print("tokens/s: whole answers; decode: without the prefill; then the share of time of each phase\n")
    if "transformers" in result:
        print(f"plain over transformers  {result['plain_over_transformers']:.2f} x")
    if "speculative" in result:
        row = result["speculative"]
        print(f"speculative over plain   {result['speedup']:.2f} x")
        by_depth = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
        print(f"acceptance length        {row['acceptance_length']:.2f} tokens per step; share of steps that reached depth 1, 2, ...: {by_depth}")
        if exact:
            print(f"same tokens as plain     {result['prompts'] - result['different_answers']} of {result['prompts']} answers")
    if len(result["categories"]) > 1:
        _print_categories(result["categories"])
    if "calibration" in result:
        _print_calibration(result["calibration"])
    print(f"peak memory              {result['peak_memory_bytes'] / 1e6:.0f} MB")


def _print_categories(categories: dict[str, dict]) -> None:
    width = max(14, 2 + max(map(len, categories)))
    speculative = any("speculative" in row for row in categories.values())
    print(f"\n{'category':<{width}}{'prompts':>8}{'plain tok/s':>13}" + (f"{'speculative':>13}{'speedup':>9}{'acceptance length':>19}" if speculative else ""))
    for name, row in categories.items():
        line = f"{name:<{width}}{row['prompts']:>8}{row['plain']['tokens_per_second']:>13.1f}"
        if "speculative" in row:
            other = row["speculative"]
            line += f"{other['tokens_per_second']:>13.1f}{row['speedup']:>7.2f} x{other['acceptance_length']:>19.2f}"
        print(line)
    print()


def _print_calibration(calibration: dict) -> None:
    print("\ncalibration: drafts whose parent was accepted, by the drafter's confidence in them")
    print(f"{'confidence':<14}{'drafts':>8}{'mean':>8}{'chosen by the target':>23}")
    for one in calibration["bins"]:
        print(f"{one['low']:.1f} to {one['high']:.1f}    {one['drafts']:>8}{number(one['confidence']):>8}{number(one['acceptance']):>23}")
    print(f"\n{'depth':<14}{'drafts':>8}{'mean':>8}{'chosen by the target':>23}{'correlation':>13}{'bins':>7}{'error':>7}")
    for one in [{"depth": "all"} | calibration, *calibration["by_depth"]]:
        numbers = [number(one[name]) for name in ("confidence", "acceptance", "correlation", "binned_correlation", "expected_calibration_error")]
        print(f"{one['depth']:<14}{one['drafts']:>8}{numbers[0]:>8}{numbers[1]:>23}{numbers[2]:>13}{numbers[3]:>7}{numbers[4]:>7}")
    print("correlation: of confidence and being chosen, over drafts and over the bins' means; error: expected calibration error\n")
