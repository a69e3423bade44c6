"""compact of four accepted rows in all layers against PyTorch's indexed copy with ready row numbers, over contiguous pages."""

import torch
from cases import WORKLOADS, Calls, Case, activation_dtype, main, on, under_pytest

from eagle_kernels import compact

PAGE_SIZE, PREFIX, ACCEPTED = 16, 128, 4  # the time does not depend on the prefix, and many copies fit


def accepted_nodes(nodes: int) -> list[int]:
    """Nodes that are not next to each other, where the tree is large enough."""
    return [0] + [min(2 * i, nodes - ACCEPTED + i - 1) for i in range(1, ACCEPTED + 1)]


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():

        def make(i: int, model=model, tree=tree) -> Calls:
            pages = -(-(PREFIX + tree.nodes) // PAGE_SIZE)
            cache = torch.zeros(model.layers, 2, pages, PAGE_SIZE, model.kv_heads, model.head_dim, dtype=dtype, device=device)
            order = torch.randperm(pages)
            nodes = torch.tensor([accepted_nodes(tree.nodes)], dtype=torch.int32)
            rows = cache.view(model.layers, 2, pages * PAGE_SIZE, model.kv_heads, model.head_dim)
            logical = torch.arange(PREFIX, PREFIX + tree.nodes)
            physical = order[logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE
            source, destination = on(device, physical[nodes[0].long()], physical[: ACCEPTED + 1])
            table, seq_lens, nodes, count = on(device, order.int()[None], torch.tensor([PREFIX], dtype=torch.int32), nodes, torch.tensor([ACCEPTED], dtype=torch.int32))

            def copy() -> None:
                rows[:, :, destination] = rows[:, :, source]

            return Calls(lambda: compact(cache, table, seq_lens, nodes, count), copy)

        row_bytes = model.layers * 2 * model.kv_heads * model.head_dim * dtype.itemsize
        result.append(Case("compact", name, 2 * ACCEPTED * row_bytes, 0, make))
    return result


def test_compact(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
