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


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import roofline

    return roofline


def test_roofline_equals_the_hand_calculation(roofline) -> None:
    """Llama-3.1-8B on an H200: 60 nodes, max_depth 6, top_k 10, context 1024, every number worked out by hand."""
    command = [sys.executable, str(BENCH / "roofline.py"), "--model", "llama-3.1-8b", "--device", "h200", "--num-nodes", "60", "--max-depth", "6", "--json"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    speculative, plain = ({part["name"]: part for part in result[name]} for name in ("speculative", "plain"))
    # A layer: q and o 4096 x 4096, k and v 1024 x 4096, gate, up and down 14336 x 4096.
    layer = 2 * 16_777_216 + 2 * 4_194_304 + 3 * 58_720_256
    assert layer == 218_103_808
    assert speculative["target layers"]["num_bytes"] == plain["target layers"]["num_bytes"] == 32 * layer * 2 == 13_958_643_712
    assert speculative["target head"]["num_bytes"] == 128_256 * 4096 * 2 == 1_050_673_152
    assert speculative["target layers"]["flops"] == 2 * 60 * 32 * layer
    # 2 x 8 heads x 128 x 2 bytes = 4096 bytes a layer and token; 1024 + 60 rows.
    assert speculative["target attention"]["num_bytes"] == 32 * 4096 * 1084
    assert speculative["target attention"]["flops"] == 32 * 4 * 60 * 1084 * 32 * 128
    # The drafter: fc 8192 x 4096 and a layer.
    assert speculative["draft level layer"]["num_bytes"] == 2 * (33_554_432 + layer) and speculative["draft level layer"]["count"] == 5
    assert speculative["draft head"]["count"] == 6 and speculative["draft head"]["num_bytes"] == 1_050_673_152
    assert speculative["target layers"]["seconds"] == pytest.approx(13_958_643_712 / 4.8e12) == pytest.approx(2.908e-3, rel=1e-3)
    assert speculative["target attention"]["seconds"] == pytest.approx(96 * 1.3e-6)  # three launches a layer are more than the bytes
    assert result["plain_seconds"] == pytest.approx(2.9080e-3 + 0.1248e-3 + 0.2189e-3 + 0.0013e-3, rel=1e-3)
    draft = 0.10486e-3 + 3 * 1.3e-6 + 5 * 0.10486e-3 + 5 * 3 * 1.3e-6 + 6 * 0.21889e-3 + 6 * 1.3e-6 + 1.3e-6
    rest = 2.9080e-3 + 0.1248e-3 + 0.2189e-3 + 4 * 60 * 128_256 / 4.8e12 + 3 * 1.3e-6
    assert result["step_seconds"] == pytest.approx(draft + rest, rel=1e-3)
    assert result["tokens_per_second"] == pytest.approx(4.0 / result["step_seconds"])


def test_roofline_is_bound_by_operations_where_it_should_be(roofline) -> None:
    device = roofline.DEVICES["a100"]
    long = roofline.attention("attention", 1, roofline.MODELS["llama-3.1-8b"], 1, 60, 32768)
    # 60 rows x 4 heads a KV head: 240 operations a byte, more than the 153 of the chip.
    assert long.bound(device) == "operations" and long.seconds(device) == pytest.approx(4 * 60 * 32828 * 32 * 128 / 312e12)
    assert roofline.matrices("product", 1, 10**9, 200, 1).bound(device) == "operations"
    assert roofline.matrices("product", 1, 10**9, 100, 1).bound(device) == "bytes"


def test_roofline_says_what_is_wrong() -> None:
    outcome = subprocess.run([sys.executable, str(BENCH / "roofline.py"), "--max-depth", "0"], capture_output=True, text=True)
    assert outcome.returncode == 2 and "--max-depth must be at least 1" in outcome.stderr
