"""bench/gpu_check.sh and its helpers, without a GPU: with a stand-in for python on the PATH, and on made-up results."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "gpu_check.sh"
SECTIONS = ["facts", "build", "optests", "graphs", "bitwise", "sanitizer", "opbench", "stepbench", "demo"]

# Says that there is a GPU, fails for whatever $FAIL matches, and hands the report to the real one. A process that runs pytest leaves the counts that pytest would.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
*gpu_report.py*) exec "$REAL_PYTHON" "$@" ;;
*"gpu_facts.py --name"*) echo fake-gpu; exit 0 ;;
*"gpu_facts.py --missing"*) echo "$MISSING"; exit 0 ;;
esac
if [[ "$*" =~ --junitxml=([^ ]+) ]]; then
    echo '<testsuites><testsuite tests="5" failures="0" errors="0" skipped="'"${SKIPPED:-1}"'"/></testsuites>' >"${BASH_REMATCH[1]}"
fi
if [ -n "$SLEEP" ] && [[ "$*" =~ $SLEEP ]]; then sleep 60; fi
if [ -n "$FAIL" ] && [[ "$*" =~ $FAIL ]]; then echo "made to fail"; exit 3; fi
exit 0
"""


@pytest.fixture
def check(tmp_path: Path):
    """Runs the script with the stand-in; its result, and the folder of results."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    out = tmp_path / "out"

    def run(*sections: str, script: Path = SCRIPT, cwd: Path | None = None, **settings: str) -> subprocess.CompletedProcess:
        environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "OUT": str(out), "CALLS": str(tmp_path / "calls"), "REAL_PYTHON": sys.executable}
        environment |= {"FAIL": "", "SLEEP": "", "MISSING": ""} | settings
        return subprocess.run(["bash", str(script), *sections], capture_output=True, text=True, env=environment, timeout=120, cwd=cwd)

    run.out, run.calls = out, lambda: (tmp_path / "calls").read_text().splitlines()
    return run


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of bench/."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def sections_of(out: Path) -> dict[str, str]:
    return {section["name"]: section["status"] for section in json.loads((out / "gpu_check.json").read_text())["sections"]}


def test_syntax_and_limits() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text()
    limits = {name: int(seconds) for name, seconds in re.findall(r"\[(\w+)\]=(\d+)", text)}
    assert list(limits) == SECTIONS == re.search(r"^SECTIONS=\((.*)\)$", text, re.MULTILINE)[1].split()
    assert sum(limits.values()) <= 595  # ten minutes with the report


def test_every_file_it_names_is_there() -> None:
    names = re.findall(r"(?:bench|tests)/[\w*]+\.py|setup\.py", SCRIPT.read_text())
    assert len(names) > 10
    for name in names:
        assert list(ROOT.glob(name)), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("section", [(), ("facts",), ("demo",)], ids=["all", "facts", "demo"])
def test_without_a_gpu_it_says_so_and_fails(section: tuple[str, ...], tmp_path: Path) -> None:
    result = subprocess.run(["bash", str(SCRIPT), *section], capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")})
    assert result.returncode == 2
    assert "there is no GPU here" in result.stderr and "nothing was checked" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_section_is_named(check) -> None:
    result = check("facts", "opbenhc")
    assert result.returncode == 2 and "got opbenhc" in result.stderr and not check.out.exists()


def test_all_sections_in_their_order(check) -> None:
    result = check()
    statuses = sections_of(check.out)
    assert list(statuses) == SECTIONS
    missing = subprocess.run(["bash", "-c", "command -v compute-sanitizer"], capture_output=True).returncode != 0
    assert statuses == dict.fromkeys(SECTIONS, "passed") | ({"sanitizer": "not-run"} if missing else {})
    assert result.returncode == 0 and "nothing failed" in result.stdout
    if missing:
        assert re.search(r"sanitizer +not-run .*compute-sanitizer is not installed", result.stdout)
    calls = "\n".join(check.calls())
    for part in ("gpu_facts.py --output", "setup.py build_ext", "tests/test_triton_linear.py", "tests/test_gpu_graphs.py", "tests/test_gpu_bitwise.py", "all_ops.py", "bench_step.py", "eagle_engine.cli verify"):
        assert part in calls


@pytest.mark.parametrize(
    "pattern, failed",
    [("gpu_facts.py --output", "facts"), ("setup.py", "build"), ("test_triton_linear", "optests"), ("test_gpu_graphs", "graphs"), ("test_gpu_bitwise", "bitwise"), ("all_ops", "opbench"),
     ("bench_step.py --device cuda --output", "stepbench"), ("bench_step.py --device cuda --deterministic", "stepbench"), ("cli verify", "demo")],
)  # fmt: skip
def test_a_failure_stops_nothing_and_is_reported(check, pattern: str, failed: str) -> None:
    result = check(FAIL=pattern)
    statuses = sections_of(check.out)
    assert list(statuses) == SECTIONS and [name for name, status in statuses.items() if status == "failed"] == [failed]
    assert result.returncode == 1 and f"failed: {failed}" in result.stdout
    assert "made to fail" in "".join(path.read_text() for path in check.out.glob(f"{failed}*.log"))


def test_sections_alone_and_again(check) -> None:
    assert check("opbench", FAIL="all_ops").returncode == 1
    assert check("facts", "opbench").returncode == 0
    assert sections_of(check.out) == {"opbench": "passed", "facts": "passed"}


def test_a_section_that_takes_too_long_is_ended(check, tmp_path: Path) -> None:
    copy = tmp_path / "repository" / "bench" / "gpu_check.sh"
    copy.parent.mkdir(parents=True)
    copy.write_text(SCRIPT.read_text().replace("[opbench]=85", "[opbench]=1"))
    (copy.parent / "gpu_report.py").symlink_to(ROOT / "bench" / "gpu_report.py")
    result = check("opbench", "facts", script=copy, SLEEP="all_ops")
    assert sections_of(check.out) == {"opbench": "timed-out", "facts": "passed"} and result.returncode == 1
    assert "longer than 1 s" in result.stdout


def test_relative_paths_are_the_callers(check, tmp_path: Path) -> None:
    check("build", "demo", script=Path(os.path.relpath(SCRIPT, tmp_path)), cwd=tmp_path, OUT="out", PYTHON="bin/python", WHEELS="wheels", DEMO_PARTS="./parts", MISSING="pytest")
    assert sections_of(check.out)["demo"] == "passed"
    calls = "\n".join(check.calls())
    assert f"--find-links {tmp_path}/wheels " in calls and f"demo_parts.py join {tmp_path}/parts" in calls


def test_skipped_tests_are_not_passed_tests(check) -> None:
    result = check("graphs", SKIPPED="5")
    assert result.returncode == 1 and "no test ran" in result.stdout


def test_missing_packages_are_named_with_the_remedy(check) -> None:
    result = check("build", MISSING="pytest\nninja")
    assert result.returncode == 1 and "missing packages: pytest ninja" in result.stdout
    log = (check.out / "build.log").read_text()
    assert "pip install pytest ninja" in log and "pip download" in log
    check("build", MISSING="pytest", WHEELS="/some/wheels")
    assert any("--no-index" in call and "--find-links /some/wheels" in call for call in check.calls())


def test_without_the_demo_target_a_random_pair_stands_in(check) -> None:
    result = check("demo", FAIL="demo_parts.py where")
    assert result.returncode == 0 and "a random pair: the demo target is not here" in result.stdout
    assert any("verify_random.py --device cuda" in call for call in check.calls())


ONLY_NEEDED = """
import importlib, importlib.abc, pathlib, sys
sys.path[:0] = [{root!r}, {root!r} + "/bench", {root!r} + "/tests"]
import gpu_facts
allowed = {{*gpu_facts.NEEDED, *sys.stdlib_module_names, "torch", "torchgen", "functorch", "triton", "sympy", "mpmath", "networkx", "fsspec", "filelock", "typing_extensions"}}  # torch's own among them
allowed |= {{"eagle_kernels", "eagle_engine", "_pytest", "py", "_yaml", *(path.stem for folder in ("bench", "tests") for path in pathlib.Path({root!r}, folder).glob("*.py"))}}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
for name in {modules!r}:
    importlib.import_module(name)
"""


def test_the_packages_that_it_asks_for_are_enough() -> None:
    """Everything that the sections import, with all other packages refused."""
    modules = [path.stem for path in sorted((ROOT / "tests").glob("test_triton_*.py"))] + ["test_cuda_ops", "test_gpu_graphs", "test_gpu_bitwise"]
    modules += ["eagle_engine", "eagle_engine.cli.verify", "eagle_engine.gguf_checkpoint", "jinja2.sandbox", "all_ops", "bench_step", "verify_random", "sanitizer_driver", "demo_parts"]
    for extra, status in (([], 0), (["scipy"], 1)):
        result = subprocess.run([sys.executable, "-c", ONLY_NEEDED.format(root=str(ROOT), modules=modules + extra)], capture_output=True, text=True)
        assert result.returncode == status, result.stderr


def test_shards_hold_every_test_once() -> None:
    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *options, str(ROOT / "tests" / "test_gpu_bitwise.py")]
        return [line for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines() if "::" in line]

    parts = [collected(f"--shard={i}/3") for i in (1, 2, 3)]
    assert sorted(sum(parts, [])) == sorted(collected()) and min(map(len, parts)) > 20


def made_up_step(plain: float, speculative: float, level: float, allocated: int) -> dict:
    return {
        "plain": {"milliseconds": 3.9, "floor_milliseconds": 3.9 / plain, "over_floor": plain}, "speculative": {"milliseconds": 3.9 * speculative}, "step_over_plain": speculative,
        "draft_level_over_floor": level, "acceptance_length": 4.0, "tokens_per_second": 800.0, "plain_tokens_per_second": 256.4, "bytes_allocated_by_replays": allocated,
    }  # fmt: skip


def made_up_results(folder: Path) -> None:
    (folder / "sections.tsv").write_text("facts\tpassed\t0\t12.5\t35\nbuild\tfailed\t1\t3.0\t120\noptests\tpassed\t0\t80.0\t110\nsanitizer\tnot-run\t77\t0.1\t50\n")
    (folder / "sanitizer.note").write_text("compute-sanitizer is not installed\n")
    (folder / "optests-a.xml").write_text('<testsuites><testsuite tests="7" failures="0" errors="0" skipped="2"/></testsuites>')
    (folder / "optests-b.xml").write_text('<testsuites><testsuite tests="4" failures="0" errors="0" skipped="0"/></testsuites>')
    (folder / "optests-c.xml").write_text("<testsuites><testsui")
    rows = [("expand_topk", "llama-3.1-8b", 12.0, 0.1), ("rerank", "llama-3.1-8b", 6.0, 0.0), ("accept", "llama-3.1-8b with stops and ring", 5.5, 0.0), ("compact", "llama-3.1-8b", 4.0, 0.2),
            ("tree_attention", "llama-3.1-8b prefix 8192 nodes 64", 20.0, 0.86), ("tree_attention", "llama-3.1-8b prefix 1024 nodes 64", 9.0, 0.4)]  # fmt: skip
    (folder / "ops.json").write_text(json.dumps({"rows": [{"op": op, "case": case, "microseconds": us, "share_of_copy": share} for op, case, us, share in rows]}))
    (folder / "step.json").write_text(json.dumps(made_up_step(1.1, 1.4, 1.2, 512)))


def test_report_of_made_up_results(bench, tmp_path: Path) -> None:
    made_up_results(tmp_path)
    result, text, status = bench("gpu_report").make_report(tmp_path)
    assert status == 1 and result["failed"] == ["build"]
    assert [(s["name"], s["status"], s["remark"]) for s in result["sections"]] == [
        ("facts", "passed", ""), ("build", "failed", ""), ("optests", "passed", "9 tests passed, 0 failed, 2 skipped"), ("sanitizer", "not-run", "compute-sanitizer is not installed"),
    ]  # fmt: skip
    assert {budget["name"]: (budget["measured"], budget["met"]) for budget in result["budgets"]} == {
        "plain step over its floor": (1.1, True),
        "speculative over plain step": (1.4, False),
        "draft level over its floor": (1.2, True),
        "tree_attention, 64 nodes, 8k prefix, of copy bandwidth": (0.86, True),
        "expand_topk": (12.0, True),
        "rerank and accept": (11.5, False),
        "compact": (4.0, True),
        "memory allocated by 100 replayed steps": (512, False),
    }
    assert re.search(r"speculative over plain step +<= 1.35 x +1.40  NO", text)
    assert re.search(r"tree_attention, 64 nodes.* >= 0.85 +0.86  yes", text)
    assert "failed: build" in text
    json.dumps(result)


def test_report_without_figures_says_not_measured(bench, tmp_path: Path) -> None:
    (tmp_path / "sections.tsv").write_text("facts\tpassed\t0\t12.5\t35\n")
    (tmp_path / "step.json").write_text('{"plain": ')  # cut off
    result, text, status = bench("gpu_report").make_report(tmp_path)
    assert status == 0 and {budget["met"] for budget in result["budgets"]} == {None}
    assert text.count("not measured") == len(result["budgets"])


def test_a_limit_that_is_just_reached_is_met(bench) -> None:
    report = bench("gpu_report")
    for value, at_least, met in [(1.0, False, True), (1.01, False, False), (1.0, True, True), (0.99, True, False)]:
        assert report.Budget("name", 1.0, "", at_least, value).met is met


def test_parts_join_to_the_same_file(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = bench("demo_parts")
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    source, joined = tmp_path / "model.gguf", tmp_path / "there" / "model.gguf"
    source.write_bytes(os.urandom(2500))
    made = parts.split(source, tmp_path / "parts")
    assert [part.stat().st_size for part in made] == [1000, 1000, 500]
    parts.join(tmp_path / "parts", joined, parts._sha256(source))
    assert joined.read_bytes() == source.read_bytes()
    joined.unlink()
    made[1].unlink()
    with pytest.raises(SystemExit, match="is one missing"):
        parts.join(tmp_path / "parts", joined, parts._sha256(source))
    assert list(joined.parent.iterdir()) == []


@pytest.mark.parametrize("script", ["sanitizer_driver.py", "verify_random.py"])
def test_drivers_run_on_the_cpu(script: str) -> None:
    result = subprocess.run([sys.executable, ROOT / "bench" / script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "identical" in result.stdout if script == "verify_random.py" else result.stdout.count("equal") == 5


def test_the_sanitizer_driver_notices_a_wrong_result(bench) -> None:
    driver = bench("sanitizer_driver")

    def wrong(**arguments):
        driver.compact(**arguments)
        arguments["kv_cache"].view(-1)[5] += 1

    cache = torch.randn(1, 2, 3, 4, 1, 8)
    arguments = {"kv_cache": cache, "page_table": torch.arange(3, dtype=torch.int32)[None], "seq_lens": torch.tensor([2], dtype=torch.int32)}
    arguments |= {"accepted_nodes": torch.tensor([[0, 3]], dtype=torch.int32), "num_accepted_drafts": torch.tensor([1], dtype=torch.int32)}
    with pytest.raises(SystemExit, match="compact: differs"):
        driver.compare("compact", wrong, arguments, "cpu")


def test_the_build_check_notices_an_extension_without_cuda(bench) -> None:
    if torch.version.cuda is None:
        with pytest.raises(SystemExit, match="expected a CUDA kernel"):
            bench("sanitizer_driver").check_build()
