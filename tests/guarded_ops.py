"""A program: every op on the CPU with each of its tensors ending, then beginning, where memory may not be touched. Dies of a segmentation fault when one reads or writes beyond. Arguments: nothing, or "beyond" to do just that."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from eagle_kernels import available_isas, pack_weight, set_isa
from helpers import make_paged_cache
from test_opcheck import OPS, make_cases

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
KEPT: list[mmap.mmap] = []


def guarded(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy, storage and strides included, whose storage ends before a forbidden page or begins behind one."""
    storage = tensor.untyped_storage()
    pages = -(-max(storage.nbytes(), 1) // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    forbidden = start + pages * PAGE if at_end else start
    if LIBC.mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    KEPT.append(memory)
    if storage.nbytes() == 0:
        return tensor.clone()
    offset = pages * PAGE - storage.nbytes() if at_end else PAGE
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
    copy.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    return copy.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def more_cases() -> dict[str, list[tuple[object, ...]]]:
    """Whole panels of weights in odd and even number, several blocks of inputs and tiles of rows; contexts over several pages."""
    linear = []
    for dtype in (torch.float32, torch.bfloat16):
        for out_features, in_features in ((16, 20), (32, 33), (48, 300), (80, 576)):
            weight = pack_weight(torch.randn(out_features, in_features).to(dtype))
            linear += [(torch.randn(rows, in_features), weight.data, None, out_features, False, torch.empty(rows, out_features)) for rows in (1, 2, 3, 8, 9, 17, 70)]
    head = [(x, weight, out_features, torch.empty(len(x), 1, 4, dtype=torch.int64), torch.empty(len(x), 1), torch.empty(len(x), 1)) for x, weight, _, out_features, _, _ in linear]
    embedding = [(torch.tensor([0, out_features - 1]), weight, out_features, torch.empty(2, x.shape[1])) for x, weight, _, out_features, _, _ in linear[::7]]
    attention = []
    for head_dim, dtype in ((16, torch.float32), (80, torch.bfloat16), (64, torch.bfloat16)):
        for num_queries in (1, 5, 33):
            cache = make_paged_cache([0, 31, 300], num_queries, 16, 2, head_dim, dtype=dtype, poison=0.0)
            q = torch.randn(3, num_queries, 6, head_dim)
            attention.append((q, *cache, None, 0.25, 0, 0.0, False, torch.empty_like(q), None))
    norm = [(torch.randn(rows, size), torch.randn(size), 1e-5, None, torch.empty(rows, size)) for rows in (1, 4) for size in (1, 15, 16, 576, 577)]
    silu = [(torch.randn(rows, 2 * size), torch.empty(rows, size)) for rows in (1, 4) for size in (1, 15, 16, 57)]
    return {"linear": linear, "head_topk": head, "embedding": embedding, "tree_attention": attention, "rms_norm": norm, "silu_mul": silu}


def run(name: str, arguments: tuple[object, ...], at_end: bool) -> None:
    plain = [value.clone() if isinstance(value, torch.Tensor) and value.is_contiguous() else value for value in arguments]
    near = [guarded(value, at_end) if isinstance(value, torch.Tensor) else value for value in plain]
    for values in (near, plain):
        getattr(OPS, name)(*values)
    for i, (a, b) in enumerate(zip(near, plain)):
        if isinstance(a, torch.Tensor) and not torch.equal(torch.nan_to_num(a, nan=-7.0), torch.nan_to_num(b, nan=-7.0)):
            raise AssertionError(f"{name}: argument {i} differs")


def main() -> None:
    torch.manual_seed(0)
    if "beyond" in sys.argv:
        for at_end in (True, False):
            tensor = guarded(torch.zeros(5), at_end)
            ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
            print("inside", flush=True)
        ctypes.string_at(tensor.data_ptr() - 1, 1)
        return
    cases = make_cases()
    for name, more in more_cases().items():
        cases[name] += more
    for isa in available_isas():
        set_isa(isa)
        for name, arguments in cases.items():
            for each in arguments:
                for at_end in (True, False):
                    shapes = [list(value.shape) if isinstance(value, torch.Tensor) else value for value in each]
                    print(isa, name, "at the end" if at_end else "at the beginning", shapes, flush=True)
                    run(name, each, at_end)
                    KEPT.clear()
    print("all inside")


if __name__ == "__main__":
    main()
