"""What the op tests share: paged caches with poison, random trees, comparisons that say where and how much."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from eagle_kernels import reference
from hypothesis import strategies as st

ABSURD_PAGES = (2**31 - 1, -(2**31), -7, 10**6)


class PagedCache(NamedTuple):
    """kv [..., 2, pages, page_size, kv_heads, head_dim]; page_table [B, max_pages] int32; seq_lens [B] int32."""

    kv: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor

    def location(self, b: int, row: int) -> tuple[int, int]:
        """Page and slot of logical row `row` of sequence b."""
        page_size = self.kv.shape[-3]
        return int(self.page_table[b, row // page_size]), row % page_size

    def copy(self) -> "PagedCache":
        return PagedCache(*(tensor.clone() for tensor in self))


def make_paged_cache(
    seq_lens: Sequence[int],
    num_tentative: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    poison: float = float("nan"),
    spare_pages: int = 3,
) -> PagedCache:
    """Random rows below seq_len + num_tentative, poison in all other rows and pages, pages in shuffled order.

    Entries of the page table behind the last page in use are absurd. layers=None: the cache of one layer.
    """
    num_used = [(length + num_tentative + page_size - 1) // page_size for length in seq_lens]
    num_pages = sum(num_used) + spare_pages
    lead = () if layers is None else (layers,)
    kv = torch.full((*lead, 2, num_pages, page_size, num_kv_heads, head_dim), poison, dtype=dtype)
    order = torch.randperm(num_pages).tolist()
    max_pages = max(num_used, default=0) + 2
    page_table = torch.tensor([[random.choice(ABSURD_PAGES) for _ in range(max_pages)] for _ in seq_lens], dtype=torch.int32)
    cache = PagedCache(kv, page_table.reshape(len(seq_lens), max_pages), torch.tensor(seq_lens, dtype=torch.int32))
    for b, length in enumerate(seq_lens):
        for page in range(num_used[b]):
            cache.page_table[b, page] = order.pop()
        for row in range(length + num_tentative):
            page, slot = cache.location(b, row)
            kv[..., page, slot, :, :] = torch.randn(*lead, 2, num_kv_heads, head_dim).to(dtype)
    return cache


def poison_rows(cache: PagedCache, b: int, rows: Sequence[int], value: float = float("nan")) -> None:
    """Overwrite logical rows of sequence b in every layer."""
    for row in rows:
        page, slot = cache.location(b, row)
        cache.kv[..., page, slot, :, :] = value


def random_parents(num_nodes: int, branching: str = "random") -> list[int]:
    """Parents of one tree, parent[i] < i, root -1. branching: "random", "chain", "star" or "deep"."""
    pick = {
        "random": lambda i: random.randrange(i),
        "chain": lambda i: i - 1,
        "star": lambda i: 0,
        "deep": lambda i: random.randrange(max(0, i - 3), i),
    }[branching]
    return [-1] + [pick(i) for i in range(1, num_nodes)]


def random_tree(batch: int, num_nodes: int, branching: str = "random") -> torch.Tensor:
    """parent [batch, num_nodes] int32."""
    return torch.tensor([random_parents(num_nodes, branching) for _ in range(batch)], dtype=torch.int32).reshape(
        batch, num_nodes
    )


def parents_strategy(max_nodes: int) -> st.SearchStrategy[list[int]]:
    """Any tree of 1 to max_nodes nodes, as a list of parents."""
    choices = st.lists(st.integers(min_value=0, max_value=10**9), max_size=max_nodes - 1)
    return choices.map(lambda picks: [-1] + [pick % (i + 1) for i, pick in enumerate(picks)])


def path_to_root(parent: Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to `node`."""
    path = [node]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    return path[::-1]


def depths(parent: Sequence[int]) -> list[int]:
    return [len(path_to_root(parent, node)) - 1 for node in range(len(parent))]


def ancestor_mask(parent: torch.Tensor) -> torch.Tensor:
    """parent [B, N] -> ancestor-or-self [B, N, N] bool."""
    batch, num_nodes = parent.shape
    mask = torch.zeros(batch, num_nodes, num_nodes, dtype=torch.bool)
    for b in range(batch):
        for node in range(num_nodes):
            mask[b, node, path_to_root(parent[b].tolist(), node)] = True
    return mask


def packed_mask(parent: torch.Tensor) -> torch.Tensor:
    """parent [B, N] -> packed ancestor mask [B, N, ceil(N / 64)] int64."""
    return reference.pack_ancestor_mask(ancestor_mask(parent))


def strided_copy(x: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a wider buffer of NaN (or of the lowest integer): rows are not adjacent."""
    poison = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), poison, dtype=x.dtype)
    view = wide[..., 2 : 2 + x.shape[-1]]
    view.copy_(x)
    return view


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same shape, dtype and bytes: NaN payloads and signs of zero count."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.numel() == 0:
        return
    differ = byte_rows(actual).ne(byte_rows(expected)).any(-1)
    if differ.any():
        flat = int(differ.nonzero()[0])
        where = [int(index) for index in torch.unravel_index(torch.tensor(flat), actual.shape)]
        first, second = actual.reshape(-1)[flat].item(), expected.reshape(-1)[flat].item()
        pytest.fail(f"{int(differ.sum())} of {actual.numel()} differ, first at {where}: {first!r}, expected {second!r}")


def byte_rows(x: torch.Tensor) -> torch.Tensor:
    dense = torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten())  # .contiguous() would keep odd strides of dimensions of size 1
    return dense.view(torch.uint8).view(-1, x.element_size())


def assert_close_fp32(actual: torch.Tensor, oracle: torch.Tensor, torch_fp32: torch.Tensor) -> None:
    """Root mean square error against the fp64 oracle at most twice that of PyTorch in fp32; infinities and NaN in the same places.

    The greatest error may be three times PyTorch's: of two equally good orders of summation in PyTorch itself, one has up to 2.1 times
    the greatest error of the other. Both limits are plus one unit in the last place of the largest value.
    """
    assert actual.shape == oracle.shape, f"shape {list(actual.shape)}, expected {list(oracle.shape)}"
    assert actual.dtype == torch.float32 and oracle.dtype == torch.float64
    finite = oracle.isfinite()
    torch.testing.assert_close(
        actual.double().masked_fill(finite, 0.0), oracle.masked_fill(finite, 0.0), rtol=0, atol=0, equal_nan=True
    )
    if not finite.any():
        return
    error = (actual.double() - oracle)[finite].abs()
    allowed = (torch_fp32.double() - oracle)[finite].abs()
    floor = 2.0**-23 * float(oracle[finite].abs().max())
    for name, factor, value, limit in (
        ("greatest", 3, error.max(), allowed.max()),
        ("root mean square", 2, error.square().mean().sqrt(), allowed.square().mean().sqrt()),
    ):
        if not value <= factor * limit + floor:
            flat = int(error.argmax())
            pytest.fail(
                f"{name} error {float(value):.3e}, PyTorch's own {float(limit):.3e}, floor {floor:.1e}; "
                f"worst of {error.numel()}: {actual[finite][flat].item()!r}, expected {oracle[finite][flat].item()!r}"
            )


def assert_within(actual: torch.Tensor, oracle: torch.Tensor, torch_own: torch.Tensor, ulps: float = 4.0) -> None:
    """For bf16 and fp16: errors against the fp64 oracle at most twice PyTorch's own in that dtype (root mean square; the greatest error three times), and never more than `ulps` units in the last place of the largest value."""
    assert actual.dtype == torch_own.dtype and actual.dtype in (torch.bfloat16, torch.float16)
    assert actual.shape == oracle.shape, f"shape {list(actual.shape)}, expected {list(oracle.shape)}"
    if actual.numel() == 0:
        return
    assert actual.isfinite().all(), "not finite"
    unit = torch.finfo(actual.dtype).eps * float(oracle.abs().max())
    error, allowed = (actual.double() - oracle).abs(), (torch_own.double() - oracle).abs()
    greatest, limit = float(error.max()), min(3 * float(allowed.max()) + unit / 2, ulps * unit)
    assert greatest <= limit, f"greatest error {greatest:.3e}, limit {limit:.3e} (PyTorch's own {float(allowed.max()):.3e}, one unit {unit:.1e}), at {int(error.argmax())} of {error.numel()}"
    rms, own_rms = (float(e.square().mean().sqrt()) for e in (error, allowed))
    assert rms <= 2 * own_rms + unit / 8, f"root mean square error {rms:.3e}, PyTorch's own {own_rms:.3e}"


WRONG_DTYPE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float16,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
    torch.bool: torch.uint8,
}


def assert_refused(name: str, call: Callable[[], object]) -> None:
    """The call raises ValueError "name: expected ..."."""
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        call()


def assert_bad_tensors_refused(
    op: Callable[..., object],
    arguments: dict[str, object],
    names: Sequence[str],
    *,
    any_stride: Sequence[str] = (),
    any_shape: Sequence[str] = (),
    any_dtype: Sequence[str] = (),
    first: str | None = None,
) -> None:
    """Each named tensor is refused by name with a wrong dtype, one dimension too many, strided elements or another device.

    any_stride, any_shape, any_dtype: tensors that are free in that respect; first: the tensor that says which device is right.
    """
    for name in names:
        good = arguments[name]
        bad = {}
        if name not in any_dtype:
            bad["dtype"] = good.to(WRONG_DTYPE[good.dtype])
        if name not in any_shape:
            bad["shape"] = good.unsqueeze(0)
        if name not in any_stride:
            bad["stride"] = torch.stack((good, good), dim=-1)[..., 0]
        if name != first:
            bad["device"] = good.to("meta")
        for kind, tensor in bad.items():
            try:
                assert_refused(name, lambda: op(**(arguments | {name: tensor})))
            except BaseException as failure:
                raise AssertionError(f"{name} with a wrong {kind}: {failure}") from failure
