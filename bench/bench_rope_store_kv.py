"""rope_store_kv against PyTorch's rotation of q and k and indexed stores with ready row numbers."""

import torch
from cases import WORKLOADS, Calls, Case, activation_dtype, main, on, under_pytest

from eagle_kernels import rope_store_kv

PAGE_SIZE, PREFIX = 16, 1024


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():

        def make(i: int, model=model, nodes=tree.nodes) -> Calls:
            q, k, v = (torch.randn(1, nodes, heads, model.head_dim, device=device).to(dtype) for heads in (model.q_heads, model.kv_heads, model.kv_heads))
            pages = -(-(PREFIX + nodes) // PAGE_SIZE)
            cache = torch.zeros(2, pages, PAGE_SIZE, model.kv_heads, model.head_dim, dtype=dtype, device=device)
            order, logical = torch.randperm(pages), torch.arange(PREFIX, PREFIX + nodes)
            angles = torch.rand(PREFIX + nodes, model.head_dim // 2)
            table, page_table, seq_lens, position_ids, slots = on(
                device, torch.cat((angles.cos(), angles.sin()), 1), order.int()[None], torch.tensor([PREFIX], dtype=torch.int32), logical[None], order[logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE
            )
            rows, half = cache.view(2, pages * PAGE_SIZE, model.kv_heads, model.head_dim), model.head_dim // 2

            def rotate(x: torch.Tensor) -> torch.Tensor:
                cos, sin = table[position_ids][:, :, None].split(half, -1)
                return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1).to(dtype)

            def baseline() -> None:
                q.copy_(rotate(q))
                rows[0, slots], rows[1, slots] = rotate(k)[0], v[0]

            return Calls(lambda: rope_store_kv(q, k, v, position_ids, table, cache, page_table, seq_lens), baseline)

        rotated, kv = tree.nodes * (model.q_heads + model.kv_heads) * model.head_dim, tree.nodes * model.kv_heads * model.head_dim
        # q, k and v read and written, and the rows of the table; two products and a sum for each number of q and k.
        num_bytes = 2 * (rotated + kv) * dtype.itemsize + 4 * tree.nodes * model.head_dim
        result.append(Case("rope_store_kv", name, num_bytes, 3 * rotated, make))
    return result


def test_rope_store_kv(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
