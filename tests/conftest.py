"""Seeding, CPU code paths and hypothesis settings shared by all tests."""

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

# Triton decides at import: here its kernels are interpreted. On a machine with a GPU, TRITON_INTERPRET=0 runs them for real, and then test_triton_* make their tensors there.
os.environ.setdefault("TRITON_INTERPRET", "1")

import eagle_kernels
import numpy
import pytest
import torch
from eagle_kernels import reference
from gpu_mode import kernels_are_compiled, references_on_cpu
from hypothesis import HealthCheck, settings
from interpreter import checked_launches, fixed_order_dot  # noqa: F401

# The code path stays the same over the examples of one test, so the function-scoped `isa` fixture is safe with hypothesis.
settings.register_profile(
    "eagle",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("eagle")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="I/N", help="only every Nth test, from the Ith on: a file in several processes, since most of a GPU test's time is compiling")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[index - 1 :: count]
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif item.path.name.startswith("test_gpu_") and not kernels_are_compiled():
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=0, as bench/gpu_check.sh sets it"))


@pytest.fixture(autouse=True)
def seed_from_name(request: pytest.FixtureRequest) -> None:
    """Fresh random inputs per test, the same ones on every run."""
    seed = zlib.crc32(f"{request.node.path.name}::{request.node.name}".encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(autouse=True)
def profiles_of_tests(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps of tiny models cost is measured once per run, and kept apart from the profiles of real ones."""
    monkeypatch.setattr("eagle_engine.cost_profile.cache_directory", lambda: profiles)


@pytest.fixture(autouse=True)
def triton_on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In compiled mode the tests of Triton kernels make their tensors on the GPU."""
    if not (kernels_are_compiled() and request.node.path.name.startswith("test_triton_")):
        yield
        return
    for name, function in references_on_cpu("cuda").items():
        monkeypatch.setattr(reference, name, function)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture(params=eagle_kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each CPU code path that this machine can run."""
    previous = eagle_kernels.isa()
    eagle_kernels.set_isa(request.param)
    yield request.param
    eagle_kernels.set_isa(previous)


@pytest.fixture
def restore_num_threads() -> Iterator[None]:
    """For tests that call torch.set_num_threads."""
    previous = torch.get_num_threads()
    yield
    torch.set_num_threads(previous)
