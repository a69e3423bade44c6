"""What the Triton kernels share: arithmetic that is the same on the GPU and under the interpreter, and the list of what is compiled ahead of time."""

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

# The decorator decides at import, so this never changes within a process.
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


class AotCase(NamedTuple):
    """One kernel as a launcher may run it.

    signature        argument name -> "*bf16", "*fp32", "*i64", "i32", "i64", "fp32" or "constexpr", every argument in order
    constants        values of the constexpr arguments
    divisible_by_16  pointers and numbers that are multiples of 16 in the shapes that matter
    options          num_warps, num_stages, enable_fp_fusion
    mma              "mma" when it has matrix products, None when it has none
    wide_loads       its main loads are 128 bits wide
    small            compiled for sm_86, 89 and 120 too
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    options: dict[str, Any]
    mma: str | None = None
    wide_loads: bool = True
    small: bool = False


def in_both_dtypes(cases: list[AotCase]) -> list[AotCase]:
    """Cases written for bf16, and the same for fp16; those without a bf16 pointer once."""
    result = []
    for case in cases:
        if "*bf16" not in case.signature.values():
            result.append(case)
            continue
        for dtype in ("bf16", "fp16"):
            signature = {name: f"*{dtype}" if kind == "*bf16" else kind for name, kind in case.signature.items()}
            result.append(case._replace(name=f"{case.name}-{dtype}", signature=signature))
    return result


@triton.jit
def fma(a, b, c):
    """Fused multiply-add in fp32. numpy has none, so the interpreter goes through fp64, where the product is exact; only the last of two roundings could differ, by chance 2^-29."""
    if INTERPRET:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def to_float(x):
    """fp32 of a value that was loaded in any float type."""
    return x.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """acc + a b in fp32. The interpreter multiplies bf16 as raw bit patterns, and numpy's fp32 product depends on a row's place in the matrix: so in fp64 there, which rounds to the same fp32 everywhere."""
    if INTERPRET:
        return (acc.to(tl.float64) + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)).to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def exp2(x):
    """2^x in fp32. Under the interpreter through fp64: numpy's fp32 exp2 depends on an element's place in the array."""
    if INTERPRET:
        return tl.exp2(x.to(tl.float64)).to(tl.float32)
    return tl.exp2(x)
