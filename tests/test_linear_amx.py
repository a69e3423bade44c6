"""bf16 weights on the matrix unit of the CPU: what differs from the other code paths, and what must not."""

import ctypes
import math
import shutil
import subprocess

import eagle_kernels
import pytest
import torch
from eagle_kernels import linear, pack_weight
from helpers import assert_exact

pytestmark = pytest.mark.skipif("amx" not in eagle_kernels.available_isas(), reason="this processor has no AMX")


@pytest.fixture(autouse=True)
def amx():
    previous = eagle_kernels.isa()
    eagle_kernels.set_isa("amx")
    yield
    eagle_kernels.set_isa(previous)


def errors(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Greatest error of each code path against float64."""
    exact, packed, found = x.double() @ weight.double().T, pack_weight(weight), {}
    for name in ("avx512", "amx"):
        eagle_kernels.set_isa(name)
        found[name] = float((linear(x, packed) - exact).abs().max())
    eagle_kernels.set_isa("amx")
    return found


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 70])
@pytest.mark.parametrize("depth, outputs", [(1, 1), (31, 17), (32, 16), (33, 50), (256, 33), (577, 48), (1536, 100)])
def test_activations_keep_all_their_bits(rows, depth, outputs):
    """Not rounded to bf16, which would be a thousand times worse: the error is that of sums in fp32."""
    found = errors(torch.randn(rows, depth), torch.randn(outputs, depth).bfloat16())
    assert found["amx"] <= max(1.5 * found["avx512"], 1e-6), found


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e6, 1e30])
def test_magnitudes(scale):
    x, weight = torch.randn(7, 96) * scale, torch.randn(20, 96).bfloat16()
    found = errors(x, weight)
    assert found["amx"] <= 1.5 * found["avx512"], found


def test_numbers_at_the_ends_of_the_range():
    """The largest floats do not overflow, infinities and NaNs come out as such, in their own row alone."""
    x = torch.zeros(6, 40)
    largest = torch.finfo(torch.float32).max
    x[0, 3], x[1, 3], x[2, 3], x[3, 3], x[4, 3] = largest, math.inf, -math.inf, math.nan, 1.0
    # A NaN whose payload is in the lower half of its bits alone.
    x[5].view(torch.int32)[3] = 0x7F800001
    weight = torch.zeros(18, 40)
    weight[:, 3] = 1.0
    out = linear(x, pack_weight(weight.bfloat16()))
    assert_exact(out[0], torch.full((18,), largest))
    assert_exact(out[4], torch.ones(18))
    assert (out[1] == math.inf).all() and (out[2] == -math.inf).all() and out[3].isnan().all() and out[5].isnan().all()


def test_unused_memory_is_not_read(restore_num_threads):
    """The last panel ends with the weights: a tile that reached beyond it, or beyond a row of x, would find NaNs."""
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for depth in (33, 40, 63):
            whole = torch.full((9, depth + 64), math.nan)
            whole[:, :depth] = torch.randn(9, depth)
            packed = pack_weight(torch.randn(37, depth).bfloat16())
            data = torch.full((packed.data.numel() + 4096,), math.nan, dtype=torch.bfloat16)
            data[: packed.data.numel()] = packed.data.flatten()
            poisoned = packed._replace(data=data[: packed.data.numel()].view(packed.data.shape))
            assert_exact(linear(whole[:, :depth], poisoned), linear(whole[:, :depth].contiguous(), packed))


TILES = """#include <immintrin.h>
extern "C" void load(const void* config) { _tile_loadconfig(config); }
extern "C" void store(void* config) { _tile_storeconfig(config); }
extern "C" void release() { _tile_release(); }
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: a look at this thread's tiles is compiled by it")
def test_tiles_that_somebody_configured_are_put_back(tmp_path, restore_num_threads):
    """Another library on this thread may take its configuration for granted; where there was none, none is left."""
    (tmp_path / "tiles.cpp").write_text(TILES)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-mamx-tile", tmp_path / "tiles.cpp", "-o", tmp_path / "tiles.so"], check=True)
    tiles, found = ctypes.CDLL(str(tmp_path / "tiles.so")), ctypes.create_string_buffer(64)
    torch.set_num_threads(1)
    packed, x = pack_weight(torch.randn(50, 100).bfloat16()), torch.randn(3, 100)
    config = bytearray(64)
    config[0], config[16], config[48] = 1, 20, 3  # palette 1; tile 0: rows of 20 bytes, three of them
    for before in (bytes(config), bytes(64)):
        tiles.load(before) if before[0] else tiles.release()
        linear(x, packed)
        tiles.store(found)
        tiles.release()
        assert found.raw == before


def test_products_of_torch_between_ours(restore_num_threads):
    """torch's bf16 products use the same unit on the same threads."""
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 128).bfloat16()
    packed, x = pack_weight(torch.randn(50, 100).bfloat16()), torch.randn(3, 100)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        product, ours = a @ b, linear(x, packed)
        for _ in range(20):
            assert_exact(linear(x, packed), ours)
            assert_exact(a @ b, product)
            a[:7] @ b  # another configuration of tiles
