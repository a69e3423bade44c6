"""csrc/cuda compiled by nvcc for every target, warnings as errors; registers, shared memory, stack and spills as tests/nvcc_resources.json says.

After a change that is meant, `python tests/nvcc_resources.py` rewrites the table.
"""

import json
import re
import subprocess
from pathlib import Path

import nvcc_resources as nvcc
import pytest
import torch

needs_nvcc = pytest.mark.skipif(nvcc.nvcc() is None, reason="needs nvcc of the CUDA toolkit")
TABLE = json.loads(nvcc.TABLE.read_text())


def check(targets: tuple[str, ...], source: str) -> None:
    found = nvcc.measure(targets, [source])
    # Other releases of ptxas allocate registers otherwise; stack and spills must be none with any.
    fields = nvcc.FIELDS if nvcc.release() == TABLE["nvcc"] else ("stack_bytes", "spill_bytes")
    stem = Path(source).stem
    table = {kernel: by_target for kernel, by_target in TABLE["kernels"].items() if kernel.startswith(f"{stem}_kernel")}
    lines = nvcc.differences(table, found, fields)
    assert not lines, "\n".join([*lines, "if this is meant: python tests/nvcc_resources.py"])


@needs_nvcc
@pytest.mark.parametrize("source", nvcc.cuda_sources())
def test_every_target(source: str) -> None:
    blackwell = tuple(map(int, nvcc.release().split("."))) >= (12, 8)
    check(tuple(target for target in nvcc.TARGETS if blackwell or target not in ("100a", "120")), source)


def test_the_table_is_complete_and_without_stack_or_spills() -> None:
    assert {f"csrc/cuda/{path.name}" for path in (nvcc.ROOT / "csrc" / "cuda").glob("*.cu")} == set(nvcc.cuda_sources())
    assert {kernel.split("_kernel")[0] for kernel in TABLE["kernels"]} == {Path(source).stem for source in nvcc.cuda_sources()}
    for kernel, by_target in TABLE["kernels"].items():
        assert set(by_target) == set(nvcc.TARGETS), kernel
        for target, resources in by_target.items():
            assert resources["stack_bytes"] == resources["spill_bytes"] == 0, f"{kernel} sm_{target}"
            # Blocks of at most 512 threads must fit the 65536 registers of an SM.
            assert resources["registers"] <= 128, f"{kernel} sm_{target}"


def test_kernels_hold_no_inline_assembly_and_no_asynchronous_copies() -> None:
    """The CPU shim runs what C++ says and nothing else; the order of asynchronous copies is left to Triton's compiler."""
    for path in (nvcc.ROOT / "csrc" / "cuda").iterdir():
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"\basm\b|cp\.async|memcpy_async|cuda::(barrier|pipeline)|wgmma|mbarrier", code), path.name


def test_a_change_is_told_readably() -> None:
    one = {"registers": 40, "static_shared_bytes": 0, "stack_bytes": 0, "spill_bytes": 0}
    table = {"a_kernel": {"90a": one, "80": one}, "b_kernel": {"90a": one}}
    assert nvcc.differences(table, {"a_kernel": {"90a": one | {"registers": 48, "spill_bytes": 8}}, "c_kernel": {"90a": one}}) == [
        "a_kernel sm_90a registers: 40 in the table, now 48",
        "a_kernel sm_90a spill_bytes: 0 in the table, now 8",
        "b_kernel sm_90a: in the table, but there is no such kernel",
        "c_kernel sm_90a: not in the table",
    ]
    assert nvcc.differences(table, {"a_kernel": {"80": one}}) == []  # b_kernel is not for this target


SPILLING = """
__global__ void __launch_bounds__(1024, 2) spilling_kernel(float* x) {
    float values[64];
    for (int i = 0; i < 64; ++i) values[i] = x[i * 1024 + threadIdx.x];
    for (int round = 0; round < 8; ++round)
        for (int i = 0; i < 64; ++i) values[i] = values[i] * values[(i + 7) % 64] + x[round];
    for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = values[i];
}
"""


@needs_nvcc
def test_a_spill_and_a_warning_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "spilling.cu"
    source.write_text(SPILLING)
    assert nvcc.measure(["90a"], [str(source)])["spilling_kernel"]["90a"]["spill_bytes"] > 0
    source.write_text("__global__ void warning_kernel(int* x) { int unused; x[0] = 1; }")
    with pytest.raises(AssertionError, match="unused"):
        nvcc.measure(["90a"], [str(source)])


@needs_nvcc
@pytest.mark.parametrize("source, num_copies", [("csrc/cuda/compact.cu", 1), ("csrc/cuda/expand_topk.cu", 8)])
def test_copies_are_16_bytes_wide(source: str, num_copies: int, tmp_path: Path) -> None:
    """And independent: the loads of an unrolled copy stand together, before the stores."""
    ptx = tmp_path / "out.ptx"
    subprocess.run([nvcc.nvcc(), *nvcc.setup_value("NVCC_FLAGS"), "-gencode=arch=compute_90a,code=compute_90a", "-ptx", nvcc.ROOT / source, "-o", ptx], check=True)
    wide = re.findall(r"(ld|st)\.global\.(?:nc\.)?v4", ptx.read_text())
    assert " ".join(["ld"] * num_copies + ["st"] * num_copies) in " ".join(wide), wide


@needs_nvcc
def test_bindings_compile() -> None:
    """csrc/torch_cuda_ops.cpp against the headers of this torch and of CUDA; torch need not have been built for CUDA."""
    torch_headers, cuda_headers = Path(torch.__path__[0]) / "include", nvcc.cuda_headers()
    if not (torch_headers / "c10" / "cuda" / "CUDAGuard.h").exists() or not (cuda_headers / "cuda_runtime_api.h").exists():
        pytest.skip("needs the CUDA headers of torch and of the toolkit")
    # A torch without CUDA lacks one generated header, which this definition makes unnecessary.
    flags = [flag for flag in nvcc.setup_value("COMPILE_FLAGS") if flag != "-O3"] + ["-fsyntax-only", "-Werror", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    includes = [f"-I{torch_headers}", f"-I{torch_headers}/torch/csrc/api/include", f"-I{cuda_headers}"]
    done = subprocess.run(["g++", *flags, *includes, nvcc.ROOT / "csrc" / "torch_cuda_ops.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
