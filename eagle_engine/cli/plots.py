"""The plot of `eagle bench --plot`."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from eagle_engine.errors import EagleError

SUFFIXES = (".png", ".svg")


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise EagleError("--plot needs matplotlib: install it, or eagle-engine's extra train: pip install '.[train]'") from None


def plot_calibration(calibration: dict, acceptance_by_depth: list[float], heading: str, file: Path) -> None:
    """Acceptance against confidence, with a bar of counts per bin, and acceptance by depth.

    calibration          `Calibration.report`
    acceptance_by_depth  share of the steps whose accepted path reached depth 1, 2, ...
    heading              what was measured
    file                 .png or .svg; an SVG's text is text
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eagle", "font.size": 10}):
        figure = Figure(figsize=(11, 5.4), layout="constrained")
        figure.suptitle(textwrap.fill(heading, 165), fontsize=8)
        axes = figure.subplot_mosaic([["confidence", "depth"], ["counts", "depth"]], width_ratios=(3, 2), height_ratios=(4, 1))
        _plot_confidence(axes["confidence"], axes["counts"], calibration)
        _plot_depth(axes["depth"], calibration, acceptance_by_depth)
        if file.suffix.lower() == ".svg":
            FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
        else:
            FigureCanvasAgg(figure)
            figure.savefig(file, dpi=110)


def _plot_confidence(axes, counts, calibration: dict) -> None:
    bins = [one for one in calibration["bins"] if one["drafts"]]
    confidence, acceptance = [one["confidence"] for one in bins], [one["acceptance"] for one in bins]
    errors = [math.sqrt(one["acceptance"] * (1 - one["acceptance"]) / one["drafts"]) for one in bins]
    axes.plot([0, 1], [0, 1], color="#57606a", linestyle="--", linewidth=1, label="calibrated")
    axes.errorbar(confidence, acceptance, yerr=errors, marker="o", color="#1f6feb", capsize=3, linewidth=1.4, label="observed (± standard error)")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share of drafts that the target chose")
    axes.legend(loc="upper left", fontsize=8)
    correlation, binned = (number(calibration[name]) for name in ("correlation", "binned_correlation"))
    axes.set_title(f"{calibration['drafts']} drafts: correlation {correlation}, of the bins {binned}", fontsize=10)
    width = calibration["bins"][0]["high"]
    bars = counts.bar([one["low"] + width / 2 for one in bins], [one["drafts"] for one in bins], width=0.92 * width, color="#afb8c1")
    counts.bar_label(bars, fontsize=8)
    counts.margins(y=0.25)
    counts.set(xlim=(0, 1), xlabel="drafter's confidence in the draft", ylabel="drafts")


def _plot_depth(axes, calibration: dict, acceptance_by_depth: list[float]) -> None:
    depths = range(1, len(acceptance_by_depth) + 1)
    bars = axes.bar(depths, acceptance_by_depth, color="#aceebb", width=0.7, label="share of steps that reached the depth")
    axes.bar_label(bars, fmt="%.2f", fontsize=8)
    given = [one for one in calibration["by_depth"] if one["drafts"]]
    axes.plot([one["depth"] for one in given], [one["confidence"] for one in given], marker="o", color="#1f6feb", label="mean confidence of drafts")
    axes.plot([one["depth"] for one in given], [one["acceptance"] for one in given], marker="s", color="#bf3989", linestyle=":", label="share of drafts that the target chose")
    axes.set(ylim=(0, 1.02), xlabel="depth")
    axes.set_title("acceptance by depth", fontsize=10)
    axes.set_xticks(sorted(set(depths) | {one["depth"] for one in given}))
    axes.legend(loc="upper right", fontsize=8)


def number(value: float | None) -> str:
    """Two digits; a value that is undefined is n/a."""
    return "n/a" if value is None else f"{value:.2f}"
