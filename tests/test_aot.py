"""Every Triton configuration compiled ahead of time for the GPUs we name, and held to a table: registers, shared memory, no stack, no spills, the family of matrix instructions, wide loads.

    python tests/test_aot.py --write      rewrites the table from the compilers that are there
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS / "aot_resources.json"
OLDEST = "3.6"
OLDEST_DIRECTORY = TESTS.parent / ".venv" / f"triton-{OLDEST}"
# Bytes of shared memory that a block may use.
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# The matrix instructions of each chip for tiles of 64 rows and more.
MMA_FAMILY = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}
# What the default run compiles; the slow half compiles everything.
REPRESENTATIVE = ("tree_attention-shared-bf16-d128-m64", "tree_attention-own-bf16-d128-m64", "tree_attention-merge-bf16-d128")


def compile_cases(version: str, *options: str) -> Iterable[dict]:
    """Lines of aot_compile.py, run with the newest or the oldest Triton, without the interpreter."""
    paths = [str(TESTS.parent)] if version == "newest" else [str(OLDEST_DIRECTORY), str(TESTS.parent)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, str(TESTS / "aot_compile.py"), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        errors = process.stderr.read()
    assert process.returncode == 0, errors[-4000:]


def differences(version: str, found: dict, table: dict) -> list[str]:
    """What is worse than the table says, or other than it must be."""
    name, target = found["case"], found["target"]
    where = f"Triton {version}, {name}, sm_{target}"
    known = table.get(version, {}).get(name, {}).get(str(target))
    if known is None:
        return [f"{where}: not in the table"]
    lines = [f"{where}: {field} {known[field]} in the table, now {found[field]}" for field in ("registers", "shared") if found[field] > known[field]]
    # griddepcontrol: no kernel waits for its predecessor's memory in its own way, so none may be launched to overlap with it.
    lines += [f"{where}: {field} must be 0, is {found[field]}" for field in ("stack", "spills", "griddepcontrol") if found[field] != 0]
    if found["mma"] != known["mma"]:
        lines.append(f"{where}: matrix instructions {known['mma']} in the table, now {found['mma']}")
    if known["wide_loads"] > 0 and found["wide_loads"] == 0:
        lines.append(f"{where}: no 128-bit loads any more, {known['wide_loads']} in the table")
    if found["shared"] > SHARED_LIMIT[target]:
        lines.append(f"{where}: {found['shared']} bytes of shared memory, the chip has {SHARED_LIMIT[target]}")
    return lines


def check(version: str, *options: str) -> int:
    if version == OLDEST and not (OLDEST_DIRECTORY / "triton").is_dir():
        reason = f"Triton {OLDEST} is not in {OLDEST_DIRECTORY.name}: `make test` installs it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    table = json.loads(TABLE.read_text())
    found = list(compile_cases(version, *options))
    worse = [line for case in found for line in differences(version, case, table)]
    assert not worse, "\n" + "\n".join(worse) + f"\nIf this is meant: python tests/{Path(__file__).name} --write"
    return len(found)


def test_representative_cases_newest() -> None:
    options = [option for name in REPRESENTATIVE for option in ("--case", name)]
    assert check("newest", "--targets", "90", *options) == len(REPRESENTATIVE)


def test_representative_case_oldest() -> None:
    assert check(OLDEST, "--targets", "90", "--case", REPRESENTATIVE[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("version", ["newest", OLDEST])
def test_all_cases(version: str) -> None:
    assert check(version) == sum(len(targets) for targets in json.loads(TABLE.read_text())[version].values())


def test_table_lists_exactly_what_the_launchers_can_choose() -> None:
    listing = subprocess.run(
        [sys.executable, str(TESTS / "aot_compile.py"), "--list"], check=True, capture_output=True, text=True,
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(TESTS.parent)},
    ).stdout  # fmt: skip
    cases = json.loads(listing)
    wanted = {name: set(case["targets"]) for name, case in cases.items()}
    table = json.loads(TABLE.read_text())
    for version in ("newest", OLDEST):
        assert {name: {int(target) for target in targets} for name, targets in table[version].items()} == wanted, f"Triton {version}"
    for version, entries in table.items():
        for name, targets in entries.items():
            for target, known in targets.items():
                assert known["mma"] == (MMA_FAMILY[int(target)] if cases[name]["mma"] else None), (version, name, target)
                assert (known["wide_loads"] > 0) == cases[name]["wide_loads"], (version, name, target)
                assert known["stack"] == known["spills"] == 0 and known["shared"] <= SHARED_LIMIT[int(target)], (version, name, target)


def test_a_worse_kernel_is_reported_readably() -> None:
    table = {"newest": {"op": {"90": {"registers": 100, "shared": 1000, "mma": "wgmma", "wide_loads": 4}}}}
    found = {"case": "op", "target": 90, "registers": 101, "shared": 1000, "stack": 8, "spills": 0, "griddepcontrol": 0, "mma": "mma.sync", "wide_loads": 0}
    assert differences("newest", found, table) == [
        "Triton newest, op, sm_90: registers 100 in the table, now 101",
        "Triton newest, op, sm_90: stack must be 0, is 8",
        "Triton newest, op, sm_90: matrix instructions wgmma in the table, now mma.sync",
        "Triton newest, op, sm_90: no 128-bit loads any more, 4 in the table",
    ]
    assert differences("newest", found | {"case": "other"}, table) == ["Triton newest, other, sm_90: not in the table"]


def write(match: str) -> None:
    """Compile everything with both Tritons and write the table; with `match`, only the cases whose name holds it."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}

    def renew(version: str) -> None:
        cases = table.setdefault(version, {})
        for name in [name for name in cases if match in name]:
            del cases[name]
        for found in compile_cases(version, "--match", match):
            cases.setdefault(found.pop("case"), {})[str(found.pop("target"))] = found
            print(version, len(cases), flush=True)

    with ThreadPoolExecutor() as both:
        list(both.map(renew, ("newest", OLDEST)))
    TABLE.write_text(dump(table))


def dump(table: dict) -> str:
    """One line for each case and target, sorted, so that a change of the table reads as one."""
    blocks = []
    for version in sorted(table):
        lines = []
        for name in sorted(table[version]):
            targets = ",\n".join(f"    {json.dumps(target)}: {json.dumps(table[version][name][target])}" for target in sorted(table[version][name], key=int))
            lines.append(f"  {json.dumps(name)}: {{\n{targets}\n  }}")
        blocks.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True, help="rewrite the table")
    parser.add_argument("--match", default="", help="only the cases whose name holds this")
    write(parser.parse_args().match)
