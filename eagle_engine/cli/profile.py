"""eagle profile: where the time of a step goes, against what the machine allows, and why it has its tree."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch

import eagle_kernels
from eagle_engine.cli.bench import Measured
from eagle_engine.cli.common import describe_models, describe_sampling, encode_turns, load_engine, note, print_json, prompt_set, sampling_params, shape_name
from eagle_engine.engine import Engine
from eagle_engine.errors import EagleError
from eagle_engine.machine_rates import Ceilings, last_level_cache_bytes, measure_ceilings
from eagle_engine.outputs import RequestOutput
from eagle_engine.sampling_params import SamplingParams
from eagle_engine.step import PHASES
from eagle_engine.step_floors import Forward, draft_forwards, floor_seconds, verify_forwards
from eagle_engine.target import TargetModel
from eagle_engine.tree_sizes import Decision

REASONS = {
    "best": "it promises the most tokens per second",
    "off": "no tree promises more tokens per second than plain decoding",
    "probe": "drafting had been off for a while: the cheapest look at whether it pays by now",
    "refresh": "the deepest tree had not been grown for a while: for what is known of it",
    "compare": "drafting had been on for a while and this promises nearly as much: for what it costs by now",
    "first": "little is known yet: the deepest tree tells most",
}
SMALLEST_BUFFER = 64 << 20  # bytes that are read to measure the bandwidth, at least: below, the call itself takes part of the time

Size = tuple[int, int]  # max_depth, num_nodes


@dataclass
class ShapeTimes:
    """Of the steps with one tree.

    wall      seconds of each step, prefill left out
    phases    the seconds of each step in each phase
    forwards  phase -> the forwards of all steps
    """

    wall: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    forwards: dict[str, list[Forward]] = field(default_factory=lambda: defaultdict(list))

    def report(self, size: Size, decoding: float, rates: Ceilings) -> dict:
        """decoding: seconds of all steps."""
        steps, total = len(self.wall), sum(self.wall)
        rows = {}
        for phase, seconds in (*self.phases.items(), ("step", self.wall)):
            if sum(seconds) > 0:
                run = sum(self.forwards.values(), []) if phase == "step" else self.forwards.get(phase, [])
                rows[phase] = {"milliseconds": statistics.median(seconds) * 1e3, "share": sum(seconds) / total} | _floor(run, steps, statistics.median(seconds), rates)
        return {"max_depth": size[0], "num_nodes": size[1], "steps": steps, "share": total / decoding, "phases": rows}


def _floor(forwards: list[Forward], steps: int, measured: float, rates: Ceilings) -> dict:
    """Of a step on average, the share of it that was reached (1 is as fast as can be), and what most of it is."""
    if not forwards:
        return {"floor_milliseconds": None, "reached": None, "bound_by": None}
    seconds = floor_seconds(forwards, rates) / steps
    reading, multiplying = sum(one.num_bytes for one in forwards) / rates.read_bandwidth, sum(one.flops for one in forwards) / rates.fma_rate
    return {"floor_milliseconds": seconds * 1e3, "reached": seconds / measured, "bound_by": "bytes" if reading >= multiplying else "operations"}


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, default_seed=0)
    if args.draft == "none":
        raise EagleError("profile looks at the trees of a drafter: --draft none leaves nothing to look at")
    prompts = prompt_set(args)
    engine = load_engine(args)
    if engine.sizes is None:
        raise EagleError(f"nothing is chosen: with num_nodes {engine.config.num_nodes} every step is plain decoding")
    setting = f"{describe_models(args, engine)}; {describe_sampling(params)}; {len(prompts)} prompts, at most {params.max_tokens} tokens each, {args.batch_size} at a time"
    note(setting)
    encoded = [encode_turns(engine, [prompt.turns[0]], raw=args.raw, system=args.system) for prompt in prompts]
    rates, dtype = machine_rates(engine.models.target)
    outputs, times, prefill = answer(engine, encoded, params)
    failures = [(prompt.id, output if isinstance(output, str) else output.error) for prompt, output in zip(prompts, outputs)]
    failures = [(name, error) for name, error in failures if error is not None]
    for name, error in failures:
        note(f"eagle: error: prompt {name}: {error}")
    if len(failures) == len(prompts):
        raise EagleError("none of the prompts could be answered")
    result = {"setting": setting, "rates": {"read_bandwidth": rates.read_bandwidth, "fma_rate": rates.fma_rate, "fma_dtype": dtype}}
    result |= report(engine, [output for output in outputs if not isinstance(output, str) and output.error is None], times, prefill, rates)
    if args.json:
        print_json(result)
    else:
        print(text(result, engine))
    return 2 if failures else 0


def machine_rates(target: TargetModel) -> tuple[Ceilings, str]:
    """Rates for the floors, and the dtype whose products were timed: what the kernels multiply in. The buffer is as large as the weights, so that caches help to read it as much as they help a step."""
    device = target.device.type
    matrix_unit = device == "cuda" or (eagle_kernels.isa() == "amx" and target.dtype == torch.bfloat16)
    dtype = target.dtype if matrix_unit else torch.float32
    largest = 1 << 30 if device == "cuda" else 4 * last_level_cache_bytes()
    note("measuring the machine")
    return measure_ceilings(device, num_bytes=max(SMALLEST_BUFFER, min(target.num_bytes, largest)), dtype=dtype), str(dtype).removeprefix("torch.")


def answer(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[list[RequestOutput | str], dict[Size, ShapeTimes], float]:
    """Output of each prompt, or why it was refused; what the steps of each tree took; seconds of all prefills."""
    ids: list[int | str] = []
    for prompt in prompts:
        try:
            ids.append(engine.add_request(prompt, params))
        except EagleError as error:
            ids.append(str(error))
    ended: dict[int, RequestOutput] = {}
    times: dict[Size, ShapeTimes] = defaultdict(ShapeTimes)
    prefill, before = 0.0, None
    while engine.has_unfinished():
        spent_before, chosen = dict(engine.timer.seconds), sum(engine.sizes.num_steps.values())
        started = time.perf_counter()
        ended |= {output.request_id: output for output in engine.step()}
        seconds = time.perf_counter() - started
        spent = {phase: engine.timer.seconds[phase] - spent_before[phase] for phase in PHASES}
        prefill += spent["prefill"]
        if sum(engine.sizes.num_steps.values()) == chosen:
            continue  # nobody decoded
        # A captured step is waited for while the next one is on its way.
        decision = before if engine.captures_steps else engine.sizes.decision
        before = engine.sizes.decision
        if decision is not None:
            _add(times[decision.shape.max_depth, decision.shape.num_nodes], seconds, spent, forwards_of(engine, decision))
    return [ended[one] if isinstance(one, int) else one for one in ids], dict(times), prefill


def _add(times: ShapeTimes, seconds: float, spent: dict[str, float], forwards: dict[str, list[Forward]]) -> None:
    phases = {phase: value for phase, value in spent.items() if phase != "prefill"}
    times.wall.append(seconds - spent["prefill"])
    for phase, value in (phases | {"other": times.wall[-1] - sum(phases.values())}).items():
        times.phases[phase].append(value)
    for phase, run in forwards.items():
        times.forwards[phase] += run


def forwards_of(engine: Engine, decision: Decision) -> dict[str, list[Forward]]:
    """Phase -> the forwards that a step runs in it."""
    models, shape = engine.models, decision.shape
    forwards = {"verify": verify_forwards(models.target, shape, decision.batch, decision.context)}
    return forwards | ({"draft": draft_forwards(models.drafter, models.target, shape, decision.batch, decision.context)} if shape.levels else {})


def report(engine: Engine, outputs: list[RequestOutput], times: dict[Size, ShapeTimes], prefill: float, rates: Ceilings) -> dict:
    decoding = sum(sum(one.wall) for one in times.values())
    measured = Measured()
    measured.add(outputs, prefill + decoding, {})
    summary, sizes = measured.summary(), engine.sizes
    return {
        "shapes": [one.report(size, decoding, rates) for size, one in sorted(times.items(), key=lambda item: -sum(item[1].wall))],
        "prefill_seconds": prefill,
        "decode_seconds": decoding,
        "decision": None if sizes.decision is None else _decision(engine, sizes.decision),
        "trust": sizes.trust,
        **{name: summary[name] for name in ("tokens", "tokens_per_second", "acceptance_length", "acceptance_by_depth")},
        "acceptance_by_confidence": [
            {"expected_from": low, "steps": steps, "expected": expected / steps, "accepted": accepted / steps} for low, (steps, expected, accepted) in sorted(sizes.by_confidence.items())
        ],
        "preemptions": engine.scheduler.num_preemptions,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.stats.num_cached_tokens for output in outputs),
    }


def _decision(engine: Engine, decision: Decision) -> dict:
    """Of the last step, with a row for each tree that there is: how often it was run, and what it promised when trees were compared."""
    candidates = {(one.shape.max_depth, one.shape.num_nodes): one for one in decision.candidates}
    rows = []
    for index, shape in enumerate(engine.shapes):
        one = candidates.get((shape.max_depth, shape.num_nodes))
        promised = (None, None, None) if one is None else (one.tokens, one.seconds * 1e3, one.tokens_per_second)
        pace = engine.sizes.pace(decision.batch).ratio(index)
        rows.append(
            {"max_depth": shape.max_depth, "num_nodes": shape.num_nodes, "runs": engine.sizes.num_steps[index]}
            | dict(zip(("expected_tokens", "milliseconds", "tokens_per_second"), promised))
            | {"pace": pace, "chosen": (shape.max_depth, shape.num_nodes) == (decision.shape.max_depth, decision.shape.num_nodes)}
        )
    return {"reason": decision.reason, "explanation": REASONS[decision.reason], "batch": decision.batch, "context": decision.context, "trees": rows}


def text(result: dict, engine: Engine) -> str:
    rates = result["rates"]
    return "\n".join(
        [
            f"read bandwidth {rates['read_bandwidth'] / 1e9:.1f} GB/s, {rates['fma_dtype']} products {rates['fma_rate'] / 1e9:.0f} GFLOP/s, both measured in this run",
            *_time_table(result, engine),
            *_decision_table(result["decision"]),
            *_outcomes(result),
        ]
    )


def _time_table(result: dict, engine: Engine) -> list[str]:
    lines = [f"\n{'tree':<22}{'phase':<10}{'ms':>9}{'share':>8}{'floor ms':>11}{'reached':>9}   bound by"]
    for shape in result["shapes"]:
        names = [shape_name(shape["max_depth"], shape["num_nodes"]), f"  {shape['steps']} step{'s' if shape['steps'] > 1 else ''},", f"  {shape['share']:.0%} of the time"]
        rows = list(shape["phases"].items())
        for i in range(max(len(names), len(rows))):
            line = f"{names[i] if i < len(names) else '':<22}"
            if i < len(rows):
                phase, row = rows[i]
                floor = "" if row["floor_milliseconds"] is None else f"{row['floor_milliseconds']:>11.2f}{row['reached']:>9.0%}   {row['bound_by']}"
                line += f"{phase:<10}{row['milliseconds']:>9.2f}{row['share']:>8.0%}{floor}"
            lines.append(line.rstrip())
        lines.append("")
    lines.append(f"ms: medians; prefill, on top: {result['prefill_seconds'] * 1e3:.0f} ms beside {result['decode_seconds'] * 1e3:.0f} ms of steps")
    lines.append("floor: of each forward the greater of bytes (weights, keys and values) over bandwidth and 2 * weights * rows over the rate; reached: floor over ms")
    if engine.models.drafter.num_bytes < last_level_cache_bytes(engine.models.target.device.type):
        lines.append(f"the drafter's own weights, {engine.models.drafter.num_bytes / 1e6:.0f} MB, may stay in a cache, and a draft be faster than its floor")
    return lines


def _decision_table(decision: dict | None) -> list[str]:
    if decision is None:
        return ["\nno step was run: the first tokens ended the answers"]
    chosen = next(row for row in decision["trees"] if row["chosen"])
    lines = [
        f"\nthe last step, {decision['batch']} sequence{'s' if decision['batch'] > 1 else ''} of {decision['context']:.0f} rows, had {shape_name(chosen['max_depth'], chosen['num_nodes'])}: {decision['explanation']}",
        f"\n{'tree':<24}{'runs':>6}{'expected tokens':>17}{'ms':>9}{'tokens/s':>10}{'pace':>7}",
    ]
    for row in decision["trees"]:
        promised = "" if row["expected_tokens"] is None else f"{row['expected_tokens']:>17.2f}{row['milliseconds']:>9.2f}{row['tokens_per_second']:>10.1f}{row['pace']:>7.2f}"
        lines.append(f"{'*' if row['chosen'] else ' '} {shape_name(row['max_depth'], row['num_nodes']):<22}{row['runs']:>6}{promised}")
    return [*lines, "runs: in all steps; the others: of the last step, over all its sequences; pace: its ms over what the profile says, by what steps took here"]


def _outcomes(result: dict) -> list[str]:
    by_depth = " ".join(f"{share:.2f}" for share in result["acceptance_by_depth"]) or "none did"
    lines = [
        f"\nacceptance length {result['acceptance_length']:.2f} tokens per step; share of steps that reached depth 1, 2, ...: {by_depth}",
        f"trust {result['trust']:.2f}: drafts accepted lately for each that the drafter's confidence promised",
    ]
    if result["acceptance_by_confidence"]:
        lines.append(f"\n{'drafts promised':<18}{'steps':>7}{'on average':>12}{'accepted':>10}")
        for row in result["acceptance_by_confidence"]:
            promised = f"{row['expected_from']:.1f} to {row['expected_from'] + 0.5:.1f}"
            lines.append(f"{promised:<18}{row['steps']:>7}{row['expected']:>12.2f}{row['accepted']:>10.2f}")
    found = f"{result['cached_tokens']} of {result['prompt_tokens']} tokens of prompts were found in the KV cache"
    return [*lines, f"\n{result['tokens']} tokens, {result['tokens_per_second']:.1f} tokens/s; {result['preemptions']} preemptions; {found}"]
