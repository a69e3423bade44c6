"""copy_rows, one captured state of every node of a tree, against PyTorch's copy_."""

import torch
from cases import WORKLOADS, Calls, Case, activation_dtype, main, under_pytest

from eagle_kernels import copy_rows


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():

        def make(i: int, rows=tree.nodes, hidden=model.hidden) -> Calls:
            x, captured = torch.randn(rows, hidden, device=device).to(dtype), torch.empty(rows, 3 * hidden, dtype=dtype, device=device)
            out = captured[:, hidden : 2 * hidden]
            return Calls(lambda: copy_rows(x, out), lambda: out.copy_(x))

        result.append(Case("copy_rows", name, 2 * tree.nodes * model.hidden * dtype.itemsize, 0, make))
    return result


def test_copy_rows(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
