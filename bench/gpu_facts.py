"""What bench/gpu_check.sh asks first: is there a GPU, what is installed, what does the device reach."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Module -> the package that brings it: all that build, tests and engine need beside torch and triton, packages they need themselves included. About 40 MB together.
NEEDED = {
    "setuptools": "setuptools", "ninja": "ninja", "numpy": "numpy", "pytest": "pytest", "iniconfig": "iniconfig", "pluggy": "pluggy", "packaging": "packaging", "pygments": "pygments",
    "hypothesis": "hypothesis", "sortedcontainers": "sortedcontainers", "tqdm": "tqdm", "safetensors": "safetensors", "tokenizers": "tokenizers", "gguf": "gguf", "yaml": "pyyaml",
    "jinja2": "jinja2", "markupsafe": "markupsafe",
}  # fmt: skip

# What training needs besides: transformers, accelerate, tensorboard and matplotlib with what they need. About 60 MB.
NEEDED_FOR_TRAINING = {
    "transformers": "transformers", "huggingface_hub": "huggingface-hub", "hf_xet": "hf-xet", "httpx2": "httpx2", "httpcore2": "httpcore2", "h11": "h11", "idna": "idna", "anyio": "anyio",
    "truststore": "truststore", "regex": "regex", "typer": "typer", "click": "click", "rich": "rich", "markdown_it": "markdown-it-py", "mdurl": "mdurl", "shellingham": "shellingham",
    "annotated_doc": "annotated-doc", "annotated_types": "annotated-types", "pydantic": "pydantic", "pydantic_core": "pydantic-core", "typing_inspection": "typing-inspection",
    "accelerate": "accelerate", "psutil": "psutil", "tensorboard": "tensorboard", "tensorboard_data_server": "tensorboard-data-server", "absl": "absl-py", "grpc": "grpcio", "markdown": "markdown",
    "google.protobuf": "protobuf", "werkzeug": "werkzeug", "matplotlib": "matplotlib", "contourpy": "contourpy", "cycler": "cycler", "fontTools": "fonttools", "kiwisolver": "kiwisolver", "PIL": "pillow",
    "pyparsing": "pyparsing", "dateutil": "python-dateutil",
}  # fmt: skip


def missing_packages(training: bool = False) -> list[str]:
    needed = NEEDED | NEEDED_FOR_TRAINING if training else NEEDED
    return [package for module, package in needed.items() if not _is_here(module)]


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it lies in
        return False


def device_slug() -> str | None:
    """A name for a folder, such as nvidia-h200; None without a GPU."""
    import torch

    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-") if torch.cuda.is_available() else None


def output_of(*command: str) -> str | None:
    """The last line that a tool prints; None where it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True)
    lines = result.stdout.strip().splitlines()
    return lines[-1].strip() if result.returncode == 0 and lines else None


def launch_seconds() -> float:
    """Time of one kernel that does nothing inside a graph of 1000: what a launch costs there."""
    import torch
    from timing import captured, event_seconds, median_seconds, repeat

    tensor = torch.zeros(1, device="cuda")
    replay = captured(repeat([lambda: tensor.zero_()], 1000))
    return median_seconds({"graph": replay}, 9, event_seconds)["graph"] / 1000


def facts() -> dict:
    import torch
    from timing import measure_ceilings

    properties = torch.cuda.get_device_properties("cuda")
    versions = {}
    for name in ("torch", "triton", "numpy", "pytest", "flash-attn", "flashinfer-python"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    free, total = torch.cuda.mem_get_info()
    return {
        "device": properties.name, "compute_capability": f"{properties.major}.{properties.minor}", "multiprocessors": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size,
        "memory_bytes": total, "free_bytes": free, "python": platform.python_version(), "cuda_of_torch": torch.version.cuda, "versions": versions,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), "nvcc": output_of("nvcc", "--version"),
        "compute_sanitizer": output_of("compute-sanitizer", "--version"), **measure_ceilings("cuda")._asdict(), "launch_seconds": launch_seconds(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--name", action="store_true", help="print a name of the GPU for a folder; exit status 1 without one")
    what.add_argument("--missing", action="store_true", help="print the packages that are not installed, one a line")
    what.add_argument("--output", type=Path, metavar="FILE", help="print the facts, and write them as JSON")
    parser.add_argument("--training", action="store_true", help="with --missing: those that training needs, too")
    args = parser.parse_args()
    if args.missing:
        print("\n".join(missing_packages(args.training)))
        return 0
    slug = device_slug()
    if slug is None:
        import torch

        reason = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds none"
        print(f"there is no GPU here: {reason} (torch {torch.__version__})", file=sys.stderr)
        return 1
    if args.name:
        print(slug)
        return 0
    found = facts()
    args.output.write_text(json.dumps(found, indent=1))
    for name, value in found.items():
        print(f"{name:<20} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
