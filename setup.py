"""Builds the native extension `eagle_kernels._C`. The CPU kernels choose their instruction set at run time, so one build fits every machine of an architecture."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = [
    "csrc/torch_api.cpp",
    "csrc/torch_model_ops.cpp",
    "csrc/torch_decode_ops.cpp",
    "csrc/torch_head_ops.cpp",
    "csrc/cpu/kernels.cpp",
    "csrc/cpu/isa_portable.cpp",
    "csrc/cpu/isa_avx2.cpp",
    "csrc/cpu/isa_avx512.cpp",
    "csrc/cpu/rerank.cpp",
    "csrc/cpu/accept.cpp",
    "csrc/cpu/compact.cpp",
]

# No contraction and no fast-math: a fused multiply-add stands where the source says so and nowhere else, which is what makes all code paths agree bit for bit.
COMPILE_FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-fvisibility=hidden"]

setup(
    ext_modules=[CppExtension("eagle_kernels._C", SOURCES, extra_compile_args={"cxx": COMPILE_FLAGS}, extra_link_args=["-fopenmp"])],
    cmdclass={"build_ext": BuildExtension},
)
