"""`pytest bench/bench_<op>.py --benchmark-only`: each case of the file is a benchmark. On the GPU where there is one."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def device() -> str:
    return DEVICE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", metafunc.module.cases(DEVICE), ids=str)
