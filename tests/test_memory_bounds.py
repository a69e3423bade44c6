"""No op on the CPU touches memory outside its tensors: each is run on tensors between which and the next page nothing may be read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are forbidden with Linux's mprotect")


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, TESTS / "guarded_ops.py", *arguments], env=environment, capture_output=True, text=True, timeout=300)


def test_ops_stay_inside_their_tensors() -> None:
    done = run()
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all inside", f"{done.stdout.splitlines()[-1:]}\n{done.stderr[-2000:]}"


def test_a_byte_outside_would_be_noticed() -> None:
    done = run("beyond")
    assert done.returncode < 0 and done.stdout.split() == ["inside", "inside"]
