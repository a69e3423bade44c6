"""A benchmark of one op: its cases, run as a program, under pytest-benchmark, or by all_ops.py."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from shapes import MODELS, ModelShape
from timing import COLUMNS, Call, Ceilings, columns, header, last_level_cache_bytes, measure_ceilings, measures, parse_args, print_json, seconds_per_call


class Calls(NamedTuple):
    """What is called on one copy of the inputs; others: further baselines by name."""

    ours: Call
    torch: Call | None = None
    others: dict[str, Call] = {}


class Case(NamedTuple):
    """One row of the table.

    op, name   for people and for filters
    num_bytes  that must be read and written, from the shapes
    flops      that must be computed, multiply-adds as two
    make       number of a copy -> the calls on inputs of its own
    cold       CPU: copies take turns so that each call reads from memory; else the cache keeps the inputs, as in a step, where they have just been written. CUDA: copies always take turns
    group      cases of one group take turns, so that their ratios hold
    fields     further entries of the row
    """

    op: str
    name: str
    num_bytes: int
    flops: int
    make: Callable[[int], Calls]
    cold: bool = False
    group: str = ""
    fields: dict[str, Any] = {}

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


class Tree(NamedTuple):
    nodes: int
    top_k: int
    max_depth: int
    draft_vocab: int


# What the ops of a step are measured at.
WORKLOADS: dict[str, tuple[ModelShape, Tree]] = {"smollm2-135m": (MODELS["smollm2-135m"], Tree(8, 4, 4, 8192)), "llama-3.1-8b": (MODELS["llama-3.1-8b"], Tree(60, 10, 6, 128256))}
MAX_COPIES, MAX_COPY_BYTES = 64, {"cpu": 1 << 29, "cuda": 16 << 30}


def activation_dtype(device: str) -> torch.dtype:
    """CPU: fp32. CUDA: the weights' bf16."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def on(device: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fresh copies on the device."""
    return tuple(tensor.clone().to(device) for tensor in tensors)


class Shared:
    """Large inputs that the cases of a group share: one for each number of a copy, dropped when the next group comes."""

    def __init__(self) -> None:
        self.key, self.made = None, {}

    def get(self, key: object, i: int, make: Callable[[], Any]) -> Any:
        if key != self.key:
            self.key, self.made = key, {}
        if i not in self.made:
            self.made[i] = make()
        return self.made[i]


def num_copies(case: Case, device: str) -> int:
    """As many as it takes to exceed twice the cache, within limits."""
    if device == "cpu" and not case.cold:
        return 1
    wanted = 2 * last_level_cache_bytes(device) // case.num_bytes + 1
    return max(1, min(wanted, MAX_COPIES, MAX_COPY_BYTES[device] // case.num_bytes))


def is_cold(case: Case, device: str) -> bool:
    """All copies together do not fit the cache."""
    return num_copies(case, device) * case.num_bytes > last_level_cache_bytes(device)


@torch.inference_mode()
def run_cases(cases: list[Case], rounds: int, device: str, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each case. A baseline that fails (another library, or a graph it cannot be captured in) is named in the row, and does not cost the others."""
    rows = []
    for _, group in groupby(cases, lambda case: (case.op, case.group or case.name)):
        members, calls, errors = list(group), {}, {}
        for case in members:
            copies = [case.make(i) for i in range(num_copies(case, device))]
            baselines = {"torch": [copy.torch for copy in copies]} if copies[0].torch is not None else {}
            baselines |= {name: [copy.others[name] for copy in copies] for name in copies[0].others}
            calls[case.name, "ours"] = [copy.ours for copy in copies]
            for who, called in baselines.items():
                try:
                    seconds_per_call({who: called}, 1, device)
                    calls[case.name, who] = called
                except Exception as error:  # whatever another library raises
                    errors[case.name, who] = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = seconds_per_call(calls, rounds, device)
        for case in members:
            row = {"op": case.op, "case": case.name, "cold": is_cold(case, device)} | case.fields
            row |= measures(seconds[case.name, "ours"], case.num_bytes, case.flops, ceilings, seconds.get((case.name, "torch")))
            row["others"] = {who: value / seconds[case.name, "ours"] for (name, who), value in seconds.items() if name == case.name and who not in ("ours", "torch")}
            row["errors"] = {who: text for (name, who), text in errors.items() if name == case.name}
            rows.append(row)
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", metavar="TEXT", help="only cases whose name contains this; may be given several times")


def chosen(cases: list[Case], only: list[str] | None) -> list[Case]:
    return [case for case in cases if not only or any(text in case.name for text in only)]


def how(device: str) -> str:
    if device == "cuda":
        return "inputs rotate over copies (cold: all of them exceed L2); events around replays of a captured graph of many calls: gaps between kernels are included, Python is not"
    return "wall time, Python's call included; warm: the cache keeps the inputs, so that the share of the memory's bandwidth can pass 100 %"


def other_baselines(device: str) -> str:
    """Which further baselines this machine has."""
    if device == "cpu":
        return ""
    found = {name: importlib.util.find_spec(name) is not None for name in ("flash_attn", "flashinfer")}
    return "; ".join(f"{name} {'is' if there else 'is not'} installed" for name, there in found.items())


def show(rows: list[dict[str, Any]]) -> None:
    width = max(len(f"{row['op']} {row['case']}") for row in rows) + 2
    print(f"{'op and shape':<{width}}{'cache':<6}{COLUMNS}")
    for row in rows:
        extra = "".join(f"  {name}/ours {ratio:.2f}" for name, ratio in row["others"].items()) + "".join(f"  {who}: {text}" for who, text in row["errors"].items())
        print(f"{row['op'] + ' ' + row['case']:<{width}}{'cold' if row['cold'] else 'warm':<6}{columns(row)}{extra}")


def main(description: str, make_cases: Callable[[str], list[Case]], rounds: int = 9) -> None:
    """The program of a benchmark file."""
    args = parse_args(description.splitlines()[0], rounds=rounds, add=options)
    report(args, make_cases(args.device))


def report(args: argparse.Namespace, all_cases: list[Case]) -> None:
    """Run the cases that the arguments choose, and print or write what came out."""
    cases = chosen(all_cases, args.only)
    if not cases:
        raise SystemExit(f"--only: no case is named so; there are {', '.join(case.name for case in all_cases)}")
    ceilings = measure_ceilings(args.device)
    rows = run_cases(cases, args.rounds, args.device, ceilings)
    result = {"device": args.device, "threads": torch.get_num_threads(), **ceilings._asdict(), "rows": rows}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1))
    if args.json:
        print_json(result)
        return
    print(header(ceilings, args.device))
    print(f"medians of {args.rounds} runs that take turns; {how(args.device)}. {other_baselines(args.device)}".rstrip())
    show(rows)


def under_pytest(benchmark: Callable[[Call], object], case: Case, device: str) -> None:
    """pytest-benchmark's own timing of one call on one copy; on CUDA until the device is done, so that launching is included."""
    with torch.inference_mode():
        call = case.make(0).ours
        call()

        def synchronised() -> None:
            call()
            torch.cuda.synchronize()

        benchmark(synchronised if device == "cuda" else call)
        benchmark.extra_info.update(bytes=case.num_bytes, flops=case.flops, device=device)
