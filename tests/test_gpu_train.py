"""bench/gpu_train.sh without a GPU: with a stand-in for python that trains in no time, or for too long."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "bench" / "gpu_train.sh"

# What `eagle train` leaves: data once the prompts are answered, then states, then a drafter. $STAGE says how far it comes before the time is over.
FAKE_PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
*"--name"*) [ "$STAGE" = no-gpu ] && exit 1; echo fake-gpu ;;
*"--missing"*) [ "$STAGE" = missing ] && echo regex ;;
*"cli train"*)
    [[ "$*" =~ --out\ ([^ ]+) ]] && run=${BASH_REMATCH[1]}
    [[ "$*" =~ --states-directory\ ([^ ]+) ]] && states=${BASH_REMATCH[1]}
    [ "$STAGE" = answering ] && exit 124
    [ -f "$run/data.npz" ] || echo "data of ${run##*/}" >"$run/data.npz"
    echo '{}' >"$run/left_out.json"
    mkdir -p "$states" "$run/drafter" && echo >"$states/states.json" && echo "${run##*/}" >"$run/drafter/model.safetensors"
    [ "$STAGE" = training ] && exit 3
    [ "$STAGE" = useless ] && exit 1
    ;;
esac
exit 0
"""


@pytest.fixture
def call(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def run(*names: str, stage: str = "", **settings: str) -> tuple[int, list[str]]:
        """The exit status, and the commands of training."""
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "OUT": str(tmp_path / "out"), "RUNS": str(tmp_path / "runs"), "CALLS": str(calls), "STAGE": stage} | settings
        run.last = subprocess.run(["bash", str(SCRIPT), *names], capture_output=True, text=True, env=environment, timeout=60)
        return run.last.returncode, [line for line in calls.read_text().splitlines() if "cli train" in line]

    return run


def options(command: str) -> dict[str, str]:
    words = command.split()
    return {word: words[i + 1] for i, word in enumerate(words) if word.startswith("--") and i + 1 < len(words)}


def test_two_calls_train_both(call, tmp_path):
    status, commands = call(stage="training", DATA="a.npz", MINUTES="8")
    assert status == 3 and ["--version 3" in command for command in commands] == [True, False]
    first, second = map(options, commands)
    # There are no answers yet: EAGLE-3 may take all the time, and what it leaves is EAGLE-1/2's.
    assert 7.5 < float(first["--stop-after-minutes"]) <= 8 and first["--data"].endswith("/a.npz")
    assert (tmp_path / "runs" / "eagle1" / "data.npz").read_text() == "data of eagle3\n"
    assert first["--states-directory"] == second["--states-directory"] == str(tmp_path / "runs" / "eagle3" / "states")
    # The drafters so far are kept, and the data are named by the first call alone.
    assert (tmp_path / "out" / "eagle3" / "drafter" / "model.safetensors").read_text() == "eagle3\n"
    status, commands = call()
    assert status == 0 and len(commands) == 2 and "--data" not in options(commands[0]) and 3.5 < float(options(commands[0])["--stop-after-minutes"]) <= 4
    assert call() == (0, [])


def test_no_second_run_while_the_first_is_answering(call):
    status, commands = call(stage="answering", MINUTES="8", DATA="a.npz")
    assert status == 3 and len(commands) == 1 and "--version 3" in commands[0] and "eagle1 has to wait for the next call" in call.last.stdout
    status, commands = call(MINUTES="0", DATA="a.npz")
    assert status == 3 and commands == [] and "eagle3 has to wait for the next call" in call.last.stdout


def test_eagle1_first_has_states_of_its_own(call, tmp_path):
    assert call("eagle1", DATA="a.npz")[0] == 0
    status, commands = call("eagle3")
    assert status == 0 and options(commands[0])["--states-directory"] == str(tmp_path / "runs" / "eagle3" / "states")
    assert (tmp_path / "runs" / "eagle3" / "data.npz").read_text() == "data of eagle1\n"


@pytest.mark.parametrize(
    "names, stage, status, message", [(["eagle2"], "", 2, "unknown drafter eagle2"), (["eagle1", "x"], "", 2, "unknown drafter x"), ([], "no-gpu", 2, "no GPU"), ([], "missing", 1, "missing packages: regex"), (["eagle3"], "useless", 1, "")],
    ids=["name", "second-name", "gpu", "packages", "useless"],
)  # fmt: skip
def test_faults(call, names, stage, status, message):
    assert call(*names, stage=stage)[0] == status and message in call.last.stderr
    if stage == "useless":
        assert call(*names, stage=stage)[0] == 1
