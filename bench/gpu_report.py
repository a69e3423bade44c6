"""gpu_check.json and gpu_check.txt from what the sections of bench/gpu_check.sh left in a folder; exit status 1 if any failed.

    python bench/gpu_report.py bench/results/<date>-<gpu>
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TEST_SECTIONS = ("optests", "graphs", "bitwise")


class Section(NamedTuple):
    name: str
    status: str  # passed, failed, timed-out or not-run
    exit_status: int
    seconds: float
    limit: float
    remark: str


class Budget(NamedTuple):
    """A figure of the design's section 7: it should be at most, or at least, `limit`."""

    name: str
    limit: float
    unit: str
    at_least: bool
    measured: float | None

    @property
    def met(self) -> bool | None:
        """None: not measured."""
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def read_json(path: Path) -> Any:
    """None for a file that is not there or was cut off."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_sections(folder: Path) -> list[Section]:
    """In the order in which they first ran; of a section that ran twice, the later run."""
    sections: dict[str, Section] = {}
    for line in (folder / "sections.tsv").read_text().splitlines():
        name, status, exit_status, seconds, limit = line.split("\t")
        note = folder / f"{name}.note"
        remark = note.read_text().strip() if note.exists() else ""
        if name in TEST_SECTIONS:
            counts = count_tests(folder, name)
            if status == "passed" and counts["passed"] == 0:
                status, remark = "failed", "no test ran"  # pytest is content when all of them are skipped
            remark = "; ".join(part for part in (remark, f"{counts['passed']} tests passed, {counts['failed']} failed, {counts['skipped']} skipped") if part)
        if status == "timed-out":
            remark = "; ".join(part for part in (remark, f"longer than {limit} s") if part)
        sections[name] = Section(name, status, int(exit_status), float(seconds), float(limit), remark)
    return list(sections.values())


def count_tests(folder: Path, section: str) -> dict[str, int]:
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for path in sorted(folder.glob(f"{section}-*.xml")):
        try:
            suites = ElementTree.parse(path).getroot().iter("testsuite")
        except ElementTree.ParseError:  # the file of a process that was killed
            continue
        for suite in suites:
            failed, skipped = int(suite.get("failures", 0)) + int(suite.get("errors", 0)), int(suite.get("skipped", 0))
            counts["failed"] += failed
            counts["skipped"] += skipped
            counts["passed"] += int(suite.get("tests", 0)) - failed - skipped
    return counts


def budgets(folder: Path) -> list[Budget]:
    """For Llama-3.1-8B shapes in bf16 at batch 1."""
    step, rows = read_json(folder / "step.json"), (read_json(folder / "ops.json") or {}).get("rows", [])

    def of_step(read: Callable[[dict], float]) -> float | None:
        return None if step is None else read(step)

    def of_op(field: str, op: str, case: str) -> float | None:
        return next((row[field] for row in rows if row["op"] == op and row["case"] == case), None)

    def microseconds(op: str, case: str) -> float | None:
        return of_op("microseconds", op, case)

    rerank, accept = microseconds("rerank", "llama-3.1-8b"), microseconds("accept", "llama-3.1-8b with stops and ring")
    return [
        Budget("plain step over its floor", 1.15, "x", False, of_step(lambda s: s["plain"]["over_floor"])),
        Budget("speculative over plain step", 1.35, "x", False, of_step(lambda s: s["step_over_plain"])),
        Budget("draft level over its floor", 1.5, "x", False, of_step(lambda s: s["draft_level_over_floor"])),
        Budget("tree_attention, 64 nodes, 8k prefix, of copy bandwidth", 0.85, "", True, of_op("share_of_copy", "tree_attention", "llama-3.1-8b prefix 8192 nodes 64")),
        Budget("expand_topk", 15.0, "us", False, microseconds("expand_topk", "llama-3.1-8b")),
        Budget("rerank and accept", 10.0, "us", False, None if rerank is None or accept is None else rerank + accept),
        Budget("compact", 5.0, "us", False, microseconds("compact", "llama-3.1-8b")),
        Budget("memory allocated by 100 replayed steps", 0.0, "bytes", False, of_step(lambda s: s["bytes_allocated_by_replays"])),
    ]


def make_report(folder: Path) -> tuple[dict, str, int]:
    """What goes to gpu_check.json, what goes to gpu_check.txt, and the exit status."""
    sections, found = read_sections(folder), budgets(folder)
    failed = [section.name for section in sections if section.status in ("failed", "timed-out")]
    result = {
        "facts": read_json(folder / "facts.json"),
        "sections": [section._asdict() for section in sections],
        "failed": failed,
        "seconds": sum(section.seconds for section in sections),
        "budgets": [budget._asdict() | {"met": budget.met} for budget in found],
        "ops": read_json(folder / "ops.json"),
        "step": read_json(folder / "step.json"),
        "step_deterministic": read_json(folder / "step-deterministic.json"),
    }
    return result, table(result, sections, found), 1 if failed else 0


def table(result: dict, sections: list[Section], found: list[Budget]) -> str:
    lines = []
    facts = result["facts"]
    if facts is not None:
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
        lines.append(f"{facts['device']}, compute capability {facts['compute_capability']}, driver {facts['driver']}, CUDA {facts['cuda_of_torch']}; {versions}")
        rates = f"read {facts['read_bandwidth'] / 1e9:.0f} GB/s, copy {facts['copy_bandwidth'] / 1e9:.0f} GB/s, bf16 product {facts['fma_rate'] / 1e12:.0f} TFLOP/s"
        lines += [f"measured: {rates}, a launch inside a graph {facts['launch_seconds'] * 1e6:.2f} us", ""]
    lines.append(f"{'section':<12}{'result':<11}{'s':>7}{'limit':>7}  remark")
    lines += [f"{section.name:<12}{section.status:<11}{section.seconds:>7.1f}{section.limit:>7.0f}  {section.remark}".rstrip() for section in sections]
    lines += ["", f"{'budget (Llama-3.1-8B shapes, bf16, batch 1)':<58}{'limit':>12}{'measured':>12}  met"]
    for budget in found:
        limit = f"{'>=' if budget.at_least else '<='} {budget.limit:g} {budget.unit}".rstrip()
        measured = "-" if budget.measured is None else f"{budget.measured:.2f}"
        lines.append(f"{budget.name:<58}{limit:>12}{measured:>12}  {'not measured' if budget.met is None else 'yes' if budget.met else 'NO'}")
    for title, step in (("step", result["step"]), ("step, deterministic", result["step_deterministic"])):
        if step is not None:
            lines += ["", f"{title}: plain {step['plain']['milliseconds']:.3f} ms, speculative {step['speculative']['milliseconds']:.3f} ms, "
                      f"acceptance length {step['acceptance_length']:.2f}, {step['tokens_per_second']:.0f} tokens/s ({step['plain_tokens_per_second']:.0f} plain)"]  # fmt: skip
    failed = result["failed"]
    lines += ["", f"failed: {', '.join(failed)} (see their .log)" if failed else "nothing failed", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    result, text, status = make_report(folder)
    (folder / "gpu_check.json").write_text(json.dumps(result, indent=1))
    (folder / "gpu_check.txt").write_text(text)
    print(text, end="")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
