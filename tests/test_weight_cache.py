"""The cache of packed weights: same bits as a fresh load, rebuilt when its source or itself changes."""

import os

import pytest
import torch
from helpers import assert_exact
from tiny_targets import tiny_model, write_gguf

from eagle_engine.checkpoint import open_checkpoint
from eagle_engine.target_weights import load_weights
from eagle_engine.weight_cache import cache_directory, load_or_build

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(33, dtype=torch.bfloat16), "empty": torch.zeros(0)}


class Builder:
    """Counts how often it builds."""

    def __init__(self, tensors=TENSORS):
        self.tensors, self.calls = tensors, 0

    def __call__(self):
        self.calls += 1
        return self.tensors


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model [1].gguf"
    path.write_bytes(b"weights")
    return path


def check(tensors) -> None:
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert_exact(tensors[name], tensor)


def test_second_load_does_not_build(source, tmp_path):
    build = Builder()
    for _ in range(3):
        check(load_or_build(source, "float32", build, tmp_path / "cache"))
    assert build.calls == 1


def test_key_is_the_file_and_the_variant_and_old_entries_go(source, tmp_path):
    build, cache = Builder(), tmp_path / "cache"
    load_or_build(source, "float32", build, cache)
    load_or_build(source, "bfloat16", build, cache)
    assert (build.calls, len(list(cache.iterdir()))) == (2, 2)
    os.utime(source, ns=(1, 1))
    load_or_build(source, "float32", build, cache)
    assert (build.calls, len(list(cache.iterdir()))) == (3, 2)
    source.write_bytes(b"other weights")
    os.utime(source, ns=(1, 1))
    load_or_build(source, "float32", build, cache)
    assert (build.calls, len(list(cache.iterdir()))) == (4, 2)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_damaged_cache_is_rebuilt_with_a_warning(source, tmp_path, damage):
    cache = tmp_path / "cache"
    load_or_build(source, "float32", Builder(), cache)
    (file,) = cache.iterdir()
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    changed = {"truncated": data[:-8], "flipped": data, "empty": b"", "foreign": b"not safetensors" * 9}
    file.write_bytes(changed[damage])
    build = Builder()
    with pytest.warns(UserWarning, match="damaged and will be built again"):
        check(load_or_build(source, "float32", build, cache))
    check(load_or_build(source, "float32", build, cache))
    assert build.calls == 1


def test_cache_that_cannot_be_written_costs_a_warning_only(source, tmp_path):
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.warns(UserWarning, match="could not be cached"):
        check(load_or_build(source, "float32", Builder(), tmp_path / "cache"))


def test_interrupted_write_leaves_nothing_behind(source, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle_engine.weight_cache.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_or_build(source, "float32", Builder(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_target_from_the_cache_has_the_same_bits(tmp_path, dtype):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2")))
    first = load_weights(checkpoint, dtype, progress=False, cache_directory=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    second = load_weights(checkpoint, dtype, progress=False, cache_directory=tmp_path / "cache")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert_exact(second[name], tensor)


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("EAGLE_CACHE")
    assert cache_directory().parts[-2:] == (".cache", "eagle_engine")
