"""Builds the native extension `eagle_kernels._C`. The CPU kernels choose their instruction set at run time, so one build fits every machine of an architecture.

The CUDA kernels are built when torch was built for CUDA; FORCE_CUDA=1 makes it an error if it was not, FORCE_CUDA=0 leaves them out. The build never looks for a GPU.
"""

import os
import re
import subprocess

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

SOURCES = [
    "csrc/torch_api.cpp",
    "csrc/torch_model_ops.cpp",
    "csrc/torch_decode_ops.cpp",
    "csrc/torch_head_ops.cpp",
    "csrc/cpu/kernels.cpp",
    "csrc/cpu/isa_portable.cpp",
    "csrc/cpu/isa_avx2.cpp",
    "csrc/cpu/isa_avx512.cpp",
    "csrc/cpu/isa_amx.cpp",
    "csrc/cpu/expand_topk.cpp",
    "csrc/cpu/rerank.cpp",
    "csrc/cpu/accept.cpp",
    "csrc/cpu/compact.cpp",
    "csrc/cpu/copy_rows.cpp",
    "csrc/cpu/advance.cpp",
]
CUDA_SOURCES = [
    "csrc/torch_cuda_ops.cpp",
    "csrc/cuda/expand_topk.cu",
    "csrc/cuda/rerank.cu",
    "csrc/cuda/accept.cu",
    "csrc/cuda/compact.cu",
]

# No contraction and no fast-math: a fused multiply-add stands where the source says so and nowhere else, which is what makes all code paths agree bit for bit.
COMPILE_FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-fvisibility=hidden"]
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"]
WITH_CUDA = {"0": False, "1": True}.get(os.environ.get("FORCE_CUDA"), torch.version.cuda is not None)


def gencode_flags() -> list[str]:
    """Every target that the toolkit knows; from 12.8 on it knows Blackwell."""
    if torch.version.cuda is None:
        raise SystemExit(f"eagle_kernels: FORCE_CUDA=1: expected a torch that was built for CUDA, got {torch.__version__}")
    if CUDA_HOME is None:
        raise SystemExit("eagle_kernels: expected the CUDA toolkit (nvcc) for a torch that was built for CUDA, got none; set CUDA_HOME")
    text = subprocess.run([os.path.join(CUDA_HOME, "bin", "nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(part) for part in re.search(r"release (\d+)\.(\d+)", text).groups())
    targets = ["80", "86", "89", "90a"] + (["100a", "120"] if version >= (12, 8) else [])
    # Chips that are not named compile the PTX when the kernels are first loaded.
    return [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets] + ["-gencode=arch=compute_80,code=compute_80"]


def extension():
    if not WITH_CUDA:
        return CppExtension("eagle_kernels._C", SOURCES, extra_compile_args={"cxx": COMPILE_FLAGS}, extra_link_args=["-fopenmp"])
    flags = {"cxx": COMPILE_FLAGS, "nvcc": NVCC_FLAGS + gencode_flags()}
    return CUDAExtension("eagle_kernels._C", SOURCES + CUDA_SOURCES, extra_compile_args=flags, extra_link_args=["-fopenmp"])


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
