"""Compiles the Triton kernels ahead of time, without a GPU, and prints what each needs: one JSON object per line. Run in a process of its own, since Triton decides at import whether to interpret.

    python tests/aot_compile.py --targets 90 --match tree_attention-merge
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import eagle_kernels.triton
import triton
import triton.backends.nvidia
from eagle_kernels.triton.common import INTERPRET, AotCase
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = (80, 90, 100)
SMALL_TARGETS = (86, 89, 120)
BINARIES = Path(triton.backends.nvidia.__file__).parent / "bin"


def all_cases() -> list[AotCase]:
    """What every launcher of eagle_kernels.triton can choose."""
    modules = [importlib.import_module(f"eagle_kernels.triton.{module.name}") for module in pkgutil.iter_modules(eagle_kernels.triton.__path__)]
    return [case for module in modules if hasattr(module, "aot_cases") for case in module.aot_cases()]


def targets_of(case: AotCase) -> tuple[int, ...]:
    return TARGETS + SMALL_TARGETS if case.small else TARGETS


def compile_case(case: AotCase, target: int) -> dict[str, object]:
    """Registers, stack and shared memory in bytes, the family of matrix instructions, the number of 128-bit loads and of loads and stores of spilled registers."""
    positions = {name: i for i, name in enumerate(case.signature)}
    attributes = {(positions[name],): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    kernel = triton.compile(ASTSource(case.kernel, case.signature, case.constants, attributes), target=GPUTarget("cuda", target, 32), options=case.options)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([BINARIES / "cuobjdump", "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
        sass = subprocess.run([BINARIES / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    ptx = kernel.asm["ptx"]
    families = [family for family, mark in (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma_async"), ("mma.sync", "mma.sync")) if mark in ptx]
    return {
        "case": case.name,
        "target": target,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": kernel.metadata.shared,
        "mma": "+".join(families) or None,
        "wide_loads": len(re.findall(r"\b(?:LDG|LDGSTS)\S*\.128\b", sass)) + len(re.findall(r"\bUTMALDG", sass)),
        "griddepcontrol": ptx.count("griddepcontrol"),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", help="e.g. 80,90; default: all that each case has")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--case", action="append", help="only this case; may be given several times")
    parser.add_argument("--list", action="store_true", help="print the names of all cases with their targets and what their code must hold, and compile nothing")
    args = parser.parse_args()
    if args.list:
        print(json.dumps({case.name: {"targets": targets_of(case), "mma": case.mma is not None, "wide_loads": case.wide_loads} for case in all_cases()}))
        return
    if INTERPRET.value:
        sys.exit("TRITON_INTERPRET is set: kernels would not be compiled")
    wanted = None if args.targets is None else {int(target) for target in args.targets.split(",")}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for case in all_cases():
            if args.match not in case.name or (args.case and case.name not in args.case):
                continue
            for target in targets_of(case):
                if wanted is None or target in wanted:
                    print(json.dumps(compile_case(case, target)), flush=True)


if __name__ == "__main__":
    main()
