"""Compiles csrc/cuda with nvcc as setup.py does, warnings as errors, and reads what ptxas says of each kernel. As a program: rewrites nvcc_resources.json."""

import ast
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).resolve().with_suffix(".json")
TARGETS = ("80", "86", "89", "90a", "100a", "120")
FIELDS = ("registers", "static_shared_bytes", "stack_bytes", "spill_bytes")

Resources = dict[str, dict[str, dict[str, int]]]  # kernel -> target -> field -> value


def setup_value(name: str) -> list[str]:
    """A list that setup.py assigns to `name`."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def nvcc() -> str | None:
    """The compiler: on PATH, or in CUDA_HOME."""
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '')}/bin")


def cuda_headers() -> Path:
    """Where nvcc, which may be a wrapper elsewhere, has its headers."""
    text = subprocess.run([nvcc(), "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=True).stderr
    return Path(re.search(r"TOP=(\S+)", text).group(1)) / "include"


def release() -> str:
    """Release of nvcc, such as "13.0"."""
    text = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", text).group(1)


def measure(targets: Iterable[str], sources: Iterable[str]) -> Resources:
    """What each kernel of the sources needs on each target; a warning or an error of nvcc fails."""
    found: Resources = {}
    for source in sources:
        with tempfile.TemporaryDirectory() as directory:
            gencodes = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
            command = [nvcc(), *setup_value("NVCC_FLAGS"), *gencodes, "-Xptxas", "-v", "-c", ROOT / source, "-o", f"{directory}/out.o"]
            done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        for kernel, by_target in parse(done.stdout + done.stderr).items():
            found.setdefault(kernel, {}).update(by_target)
    return found


def parse(text: str) -> Resources:
    """The lines of `ptxas -v`, one group per kernel and target."""
    found: Resources = {}
    for group in re.split(r"Compiling entry function ", text)[1:]:
        mangled, target = re.match(r"'(\w+)' for 'sm_(\w+)'", group).groups()
        number = lambda pattern: int(match.group(1)) if (match := re.search(pattern, group)) else 0  # noqa: B023, E731
        assert " bytes stack frame" in group and "registers" in group, group
        found.setdefault(kernel_name(mangled), {})[target] = {
            "registers": number(r"Used (\d+) registers"),
            "static_shared_bytes": number(r"(\d+) bytes smem"),
            "stack_bytes": max(number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes cumulative stack size")),
            "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        }
    return found


def kernel_name(mangled: str) -> str:
    """`compact_kernel<uint4>` of a mangled name."""
    plain = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    return re.search(r"(\w+_kernel(<[^>]*>)?)\(", plain).group(1)


def differences(table: Resources, found: Resources, fields: Iterable[str] = FIELDS) -> list[str]:
    """What is not as the table says, one readable line each; targets that were not compiled are left out."""
    compiled = {target for by_target in found.values() for target in by_target}
    lines = []
    for kernel in sorted(table | found):
        for target in sorted(compiled):
            before, now = table.get(kernel, {}).get(target), found.get(kernel, {}).get(target)
            if before is None and now is None:
                continue
            if before is None or now is None:
                lines.append(f"{kernel} sm_{target}: " + ("not in the table" if before is None else "in the table, but there is no such kernel"))
                continue
            lines += [f"{kernel} sm_{target} {field}: {before[field]} in the table, now {now[field]}" for field in fields if before[field] != now[field]]
    return lines


def cuda_sources() -> list[str]:
    return [source for source in setup_value("CUDA_SOURCES") if source.endswith(".cu")]


if __name__ == "__main__":
    TABLE.write_text(json.dumps({"nvcc": release(), "kernels": measure(TARGETS, cuda_sources())}, indent=1, sort_keys=True) + "\n")
    print(f"wrote {TABLE.relative_to(ROOT)}")
