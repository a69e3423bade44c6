"""eagle tune: what a step costs on this machine, for each tree that an adaptive one may become."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tqdm import tqdm

from eagle_engine.cli.common import describe_models, load_engine, note, print_json, shape_name, show_progress
from eagle_engine.cost_profile import SHORT, UNMEASURED, CostProfile, load_profile
from eagle_engine.errors import EagleError
from eagle_engine.graphs import batch_buckets


def run(args: argparse.Namespace) -> int:
    if args.draft == "none":
        raise EagleError("tune measures the trees of a drafter: --draft none leaves nothing to measure")
    engine = load_engine(args, profile=UNMEASURED)
    setting = f"{describe_models(args, engine)}; at most {args.batch_size} sequences"
    note(setting)
    with tqdm(total=len(batch_buckets(args.batch_size)) + 1, desc="measuring", disable=not show_progress(), leave=False) as bar:

        def begin(what: str) -> None:
            bar.set_description(f"measuring {what}")
            bar.update()

        profile = engine.tune(begin)
    file = engine.profile_file
    kept = file.is_file() and load_profile(file) == profile  # else a warning has said why
    ratios = over_plain(profile)
    if args.json:
        print_json({"setting": setting, "file": str(file) if kept else None} | asdict(profile) | {"over_plain": ratios})
        return 0
    print(table(profile, ratios))
    if kept:
        note(f"kept in {file}")
    return 0


def over_plain(profile: CostProfile) -> list[list[float]]:
    """[shape][batch] seconds of a step over those of a plain one."""
    return [[seconds / plain for seconds, plain in zip(row, profile.base[0])] for row in profile.base]


def table(profile: CostProfile, ratios: list[list[float]]) -> str:
    width = 22
    lines = [
        f"ms per step, and over a plain step, at {SHORT} committed rows of each sequence; last column: us for each 1000 further rows of a sequence",
        "",
        f"{'':<{width}}" + "".join(f"{f'batch {batch}':>18}" for batch in profile.batches) + f"{'1000 rows':>12}",
    ]
    for shape, row, ratio, per_row in zip(profile.shapes, profile.base, ratios, profile.per_row):
        cells = "".join(f"{seconds * 1e3:>11.2f}{over:>7.2f}" for seconds, over in zip(row, ratio))
        lines.append(f"{shape_name(*shape):<{width}}{cells}{per_row * 1e9:>12.0f}")
    return "\n".join([*lines, "", "a tree pays where a sequence gets more tokens per step from it than its step costs over a plain one"])
