"""The benchmarks run, and say what scripts read from them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def run(script: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, BENCH / script, "--threads", "1", "--rounds", "1", *arguments], check=True, capture_output=True, text=True).stdout


def test_bench_linear_json():
    result = json.loads(run("bench_linear.py", "--json", "--in-features", "64", "--out-features", "256"))
    assert result["ratio_m8"] > 0 and result["ratio_m16"] > 0


@pytest.mark.parametrize("script", ["bench_linear.py", "bench_tree_attention.py", "bench_ops.py"])
def test_help(script):
    assert "--rounds" in subprocess.run([sys.executable, BENCH / script, "--help"], check=True, capture_output=True, text=True).stdout
