"""The benchmarks run, and say what scripts read from them."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle_kernels import HeadTopK, reference
from helpers import assert_exact

BENCH = Path(__file__).parent.parent / "bench"


def run(script: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, BENCH / script, "--threads", "1", "--rounds", "1", *arguments], check=True, capture_output=True, text=True).stdout


def test_bench_linear_json():
    result = json.loads(run("bench_linear.py", "--json", "--in-features", "64", "--out-features", "256"))
    assert result["ratio_m8"] > 0 and result["ratio_m16"] > 0


# Every benchmark of an op, with the arguments of its smallest case.
OPS = {
    "accept": ["--only", "smollm2-135m"], "advance": ["--only", "smollm2-135m"], "compact": ["--only", "smollm2-135m"], "copy_rows": ["--only", "smollm2-135m"], "expand_topk": ["--only", "smollm2-135m"], "head_topk": ["--only", "smollm2-135m"],
    "linear": ["--in-features", "32", "--out-features", "64", "--dtype", "fp32"], "rerank": ["--only", "smollm2-135m"], "rms_norm": ["--only", "smollm2-135m"], "rope_store_kv": ["--only", "smollm2-135m"],
    "sample": ["--only", "smollm2-135m greedy"], "silu_mul": ["--only", "smollm2-135m"], "tree_attention": ["--only", "smollm2-135m", "--prefix", "128"],
}  # fmt: skip
SCRIPTS = [f"bench_{op}" for op in OPS] + ["bench_step", "all_ops"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of bench/; ceilings are not measured but made up."""
    monkeypatch.syspath_prepend(str(BENCH))
    timing = importlib.import_module("timing")

    def load(name: str):
        module = importlib.import_module(name)
        for user in (module, importlib.import_module("cases")):
            if hasattr(user, "measure_ceilings"):
                monkeypatch.setattr(user, "measure_ceilings", lambda device: timing.Ceilings(1e10, 2e10, 1e11))
        return module

    return load


@pytest.fixture
def program(bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs the program of a module in this process; what it prints."""

    def run_here(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        capsys.readouterr()
        module = bench(name)
        if module.main is importlib.import_module("cases").main:
            module.main(module.__doc__, module.cases)
        else:
            module.main()
        return capsys.readouterr().out

    return run_here


def test_every_op_of_a_step_has_a_benchmark() -> None:
    assert sorted(path.stem for path in BENCH.glob("bench_*.py")) == sorted(f"bench_{op}" for op in [*OPS, "step"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, program, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        program(script, "--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--device", "--rounds", "--threads", "--json", "--output"))


@pytest.mark.parametrize("op", OPS)
def test_op_benchmark_runs(op: str, program, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = json.loads(program(f"bench_{op}", "--rounds", "1", "--json", "--output", str(file), *OPS[op]))
    assert json.loads(file.read_text()) == result
    rows = result["fp32"] if op == "linear" else result["rows"]
    assert rows and {row["op"] for row in rows} <= {op, "logits_topk", "expand", "accept_rejection"}
    for row in rows:
        assert row["microseconds"] > 0 and not row["errors"] and (row["torch_over_ours"] is None) == (op == "accept")
        assert row["share_of_copy"] == pytest.approx(row["bytes"] / row["microseconds"] * 1e6 / 2e10)


@pytest.mark.parametrize("op", ["rerank", "linear", "tree_attention"])
def test_table_says_what_was_cold_and_what_is_included(op: str, program) -> None:
    printed = program(f"bench_{op}", "--rounds", "1", *OPS[op])
    assert "Python's call included" in printed and "warm" in printed and "torch/ours" in printed


def test_an_unknown_case_is_refused(program) -> None:
    with pytest.raises(SystemExit, match="--only: no case is named so; there are smollm2-135m, llama-3.1-8b"):
        program("bench_rerank", "--only", "gpt")


def test_a_benchmark_that_fails_does_not_stop_the_others(bench, program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> list:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench("all_ops"), "FILES", ["bench_rerank", "bench_accept"])
    monkeypatch.setattr(bench("bench_rerank"), "cases", broken)
    monkeypatch.setattr(sys, "argv", ["all_ops.py", "--rounds", "1", "--json", "--only", "smollm2-135m"])
    assert bench("all_ops").main() == 1
    result = json.loads(program("all_ops", "--rounds", "1", "--json", "--only", "smollm2-135m"))
    assert result["failed"] == {"bench_rerank": "broken"} and [row["op"] for row in result["rows"]] == ["accept", "accept", "accept_rejection"]


# Counted by hand for Llama-3.1-8B (32 layers, hidden 4096, inner 14336, 32 and 8 heads of 128, vocabulary 128256), 60 nodes, top_k 10, max_depth 6, fp32: bytes, operations.
HAND = {
    "accept": ("llama-3.1-8b", 60 * (8 + 4 + 8), 0),
    "advance": ("llama-3.1-8b", 2 * 7 * (4096 * 4 + 8), 0),
    "compact": ("llama-3.1-8b", 2 * 4 * 32 * 2 * 8 * 128 * 4, 0),  # four rows read and written, keys and values of 32 layers
    "copy_rows": ("llama-3.1-8b", 2 * 60 * 4096 * 4, 0),
    "expand_topk": ("llama-3.1-8b", 10 * 1 * (10 * 8 + 4 + 4) + 2 * 10 * 4096 * 4, 0),
    "head_topk": ("llama-3.1-8b", 128256 * 4096 * 4 + 10 * 4096 * 4, 2 * 10 * 128256 * 4096),
    "linear": ("llama-3.1-8b gate_up bf16 deterministic M=8", 28672 * 4096 * 2 + 8 * (28672 + 4096) * 4, 2 * 8 * 28672 * 4096),
    "rerank": ("llama-3.1-8b", 510 * (8 + 4 + 4) + 60 * (8 + 4 + 4 + 8 + 8), 0),
    "rms_norm": ("llama-3.1-8b", 4 * 60 * 4096 * 4 + 4096 * 4, 4 * 60 * 4096),
    "rope_store_kv": ("llama-3.1-8b", 2 * 60 * (32 + 8 + 8) * 128 * 4 + 60 * 128 * 4, 3 * 60 * 40 * 128),
    "sample": ("llama-3.1-8b greedy", 60 * 128256 * 4, 0),
    "silu_mul": ("llama-3.1-8b", 3 * 60 * 14336 * 4, 0),
    "tree_attention": ("llama-3.1-8b prefix 1024 nodes 64", 2 * 1088 * 8 * 128 * 4 + 2 * 64 * 32 * 128 * 4, 4 * 64 * 1088 * 32 * 128),
}


@pytest.mark.parametrize("op", OPS)
def test_bytes_and_operations_are_those_counted_by_hand(op: str, bench) -> None:
    name, num_bytes, flops = HAND[op]
    case = next(case for case in bench(f"bench_{op}").cases("cpu") if case.op == op and case.name == name)
    assert (case.num_bytes, case.flops) == (num_bytes, flops)


def test_copies_exceed_twice_the_cache(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = bench("cases")
    monkeypatch.setattr(cases, "last_level_cache_bytes", lambda device: 1000)
    case = cases.Case("op", "name", 300, 0, lambda i: None, cold=True)
    assert cases.num_copies(case, "cpu") == 7 and cases.is_cold(case, "cpu")  # 2100 bytes
    assert cases.num_copies(case._replace(cold=False), "cpu") == 1 and cases.num_copies(case._replace(cold=False), "cuda") == 7
    small = case._replace(num_bytes=2)
    assert cases.num_copies(small, "cpu") == cases.MAX_COPIES and not cases.is_cold(small, "cpu")
    assert cases.num_copies(case._replace(num_bytes=2**40), "cpu") == 1


def test_a_baseline_that_fails_is_named(bench) -> None:
    cases, timing = bench("cases"), bench("timing")

    def fails() -> None:
        raise OSError("no such library")

    case = cases.Case("op", "name", 1, 0, lambda i: cases.Calls(lambda: None, fails, {"other": lambda: None}))
    (row,) = cases.run_cases([case], 1, "cpu", timing.Ceilings(1.0, 1.0, 1.0))
    assert row["errors"] == {"torch": "OSError: no such library"} and row["torch_over_ours"] is None and row["others"].keys() == {"other"}


STEP = ["--model", "tiny", "--num-nodes", "12", "--max-depth", "4", "--top-k", "3", "--context", "50", "--rounds", "1"]


@pytest.mark.parametrize("acceptance_length", [1.0, 2.5, 5.0])
@pytest.mark.parametrize("options", [[], ["--draft-vocab", "100"], ["--batch", "2"], ["--drafter", "eagle-3"], ["--drafter", "eagle-3", "--draft-vocab", "100"]], ids=["plain", "draft-vocab", "batch", "eagle-3", "eagle-3-draft-vocab"])
def test_step_has_the_acceptance_length_that_was_asked_for(options: list[str], acceptance_length: float, program) -> None:
    result = json.loads(program("bench_step", *STEP, "--json", "--acceptance-length", str(acceptance_length), *options))
    assert result["acceptance_length"] == pytest.approx(acceptance_length, abs=0.05)
    phases = [row["phase"] for row in result["phases"]]
    assert phases == ["draft-extend", "draft levels", "draft heads", "oracle", "expand", "rerank", "verify", "sample", "accept", "compact", "advance", "gaps"]
    assert sum(row["microseconds"] for row in result["phases"]) == pytest.approx(1e3 * result["speculative"]["milliseconds"])
    assert result["tokens_per_second"] == pytest.approx(result["batch"] * result["acceptance_length"] / result["speculative"]["milliseconds"] * 1e3)


@pytest.mark.parametrize("drafter", ["eagle-1", "eagle-3"])
def test_step_floors_are_those_of_the_roofline(drafter: str, program, roofline) -> None:
    result = json.loads(program("bench_step", *STEP, "--json", "--drafter", drafter))
    device = roofline.Device(1e10, 1e11)
    shape = importlib.import_module("shapes").TINY
    assert result["plain"]["floor_milliseconds"] == pytest.approx(1e3 * roofline.floor_seconds(roofline.plain_step(shape, 50), device))
    assert result["speculative"]["floor_milliseconds"] == pytest.approx(1e3 * roofline.floor_seconds(roofline.speculative_step(shape, 12, 4, 3, 50, 384, drafter), device))


def test_step_prints_a_table(program) -> None:
    printed = program("bench_step", *STEP)
    for text in ("no graphs, wall time", "gaps", "speculative over plain step", "acceptance length 4.00 (asked for 4)"):
        assert text in printed


@pytest.mark.parametrize("length", [1.0, 1.3, 2.5, 3.999, 7.0])
def test_oracle_misses_as_often_as_asked(length: float, bench) -> None:
    hits = bench("oracle").hit_positions(100, 2100, length, 6).tolist()
    misses = [i for i, hit in enumerate(hits) if not hit]
    gaps = [b - a for a, b in zip([100, *misses], misses)]
    assert set(gaps) <= {int(length), int(-(-length // 1))} and sum(gaps) / len(gaps) == pytest.approx(length, rel=0.01)
    with pytest.raises(ValueError, match="acceptance_length: expected 1 to max_depth"):
        bench("oracle").hit_positions(100, 200, 7.1, 6)


def test_oracle_kernel_equals_its_torch_form(bench) -> None:
    """Interpreted; and the rest of the head is left alone."""
    oracle = bench("oracle")
    head = HeadTopK(torch.randint(-(2**62), 2**62, (2, 3, 4, 5)), torch.randn(2, 3, 4), torch.rand(2, 3, 4))
    other = HeadTopK(*(tensor.clone() for tensor in head))
    tokens, positions = torch.tensor([[3, 0, -1], [9, 2, 1]]), torch.tensor([[0, 4, 7], [8, 9, 50]])
    next_token, hits = torch.randperm(10), torch.randint(0, 2, (11,)).to(torch.int8)
    for ahead in (1, 2):
        for kind in (torch.int32, torch.int64):
            check_oracle(oracle, head, other, tokens, positions.to(kind), ahead, next_token, hits)
    assert_exact(reference.logits_topk(torch.tensor([[0.0, oracle.BIG]]), 1).keys, torch.tensor([[[(oracle.ordered_bits(oracle.BIG) << 32) | (0xFFFFFFFF - 1)]]]))


def check_oracle(oracle, head: HeadTopK, other: HeadTopK, tokens: torch.Tensor, positions: torch.Tensor, ahead: int, next_token: torch.Tensor, hits: torch.Tensor) -> None:
    oracle.overwrite(head, tokens, positions, ahead, next_token, hits)
    oracle._overwrite_kernel[(6,)](tokens, positions, next_token, hits, *other, 10, 11, 4, 5, ahead, BITS=oracle.ordered_bits(oracle.BIG), VALUE=oracle.BIG)
    for tensor, expected in zip(other, head):
        assert_exact(tensor, expected)


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


def test_roofline_of_eagle3_equals_the_hand_calculation(roofline) -> None:
    """The same step with an EAGLE-3 drafter: 32000 tokens, q, k and v twice as wide, fc of three states once a step, three states captured for each node."""
    command = [sys.executable, str(BENCH / "roofline.py"), "--drafter", "eagle-3", "--json"]
    parts = {part["name"]: part for part in json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["speculative"]}
    layer = 218_103_808 + 16_777_216 + 2 * 4_194_304
    assert parts["draft level layer"]["num_bytes"] == 2 * layer and parts["draft level layer"]["launches"] == 10
    assert parts["draft-extend layer"]["num_bytes"] == 2 * (layer + 12288 * 4096) and parts["draft-extend layer"]["launches"] == 11
    assert parts["draft head"]["num_bytes"] == 2 * 32000 * 4096 == 262_144_000 and parts["draft head"]["launches"] == 2
    assert parts["capture"]["count"] == 3 and parts["capture"]["num_bytes"] == 2 * 60 * 4096 * 2
    assert parts["advance"]["num_bytes"] == 3 * 2 * 7 * 4096 * 2


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
