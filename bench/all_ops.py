"""All op benchmarks in one process, with one measurement of the ceilings. A file that fails is reported and does not stop the others; exit status 1 then."""

from __future__ import annotations

import importlib
import json
import traceback
from pathlib import Path

import torch
from cases import chosen, how, options, other_baselines, run_cases, show
from timing import header, measure_ceilings, parse_args, print_json

# What a budget hangs on comes first.
FIRST = ["bench_tree_attention", "bench_expand_topk", "bench_rerank", "bench_accept", "bench_compact"]
FILES = FIRST + sorted({path.stem for path in Path(__file__).parent.glob("bench_*.py")} - {*FIRST, "bench_step"})


def main() -> int:
    args = parse_args(__doc__.splitlines()[0], rounds=9, add=options)
    ceilings = measure_ceilings(args.device)
    if not args.json:
        print(header(ceilings, args.device))
        print(f"medians of {args.rounds} runs that take turns; {how(args.device)}. {other_baselines(args.device)}".rstrip())
    rows, failed = [], {}
    for name in FILES:
        try:
            cases = chosen(importlib.import_module(name).cases(args.device), args.only)
            new = run_cases(cases, args.rounds, args.device, ceilings) if cases else []
        except Exception as error:  # the next file may still run
            failed[name] = str(error)
            traceback.print_exc()
            continue
        rows += new
        if new and not args.json:
            print()
            show(new)
        result = {"device": args.device, "threads": torch.get_num_threads(), **ceilings._asdict(), "rows": rows, "failed": failed}
        if args.output is not None:  # after each file, so that a time limit costs only what is left
            args.output.write_text(json.dumps(result, indent=1))
    if args.json:
        print_json({"device": args.device, "threads": torch.get_num_threads(), **ceilings._asdict(), "rows": rows, "failed": failed})
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
