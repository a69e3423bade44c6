"""silu_mul against PyTorch's silu and product."""

import torch
from cases import WORKLOADS, Calls, Case, activation_dtype, main, under_pytest
from torch.nn import functional

from eagle_kernels import silu_mul


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():

        def make(i: int, rows=tree.nodes, inner=model.intermediate) -> Calls:
            gate_up = torch.randn(rows, 2 * inner, device=device).to(dtype)
            out = torch.empty(rows, inner, dtype=dtype, device=device)
            return Calls(lambda: silu_mul(gate_up, out=out), lambda: functional.silu(gate_up[:, :inner]) * gate_up[:, inner:])

        result.append(Case("silu_mul", name, 3 * tree.nodes * model.intermediate * dtype.itemsize, 0, make))
    return result


def test_silu_mul(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
