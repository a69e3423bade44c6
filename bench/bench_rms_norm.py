"""rms_norm with residual against PyTorch's addition and rms_norm."""

import torch
from cases import WORKLOADS, Calls, Case, activation_dtype, main, under_pytest
from torch.nn import functional

from eagle_kernels import rms_norm


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():

        def make(i: int, rows=tree.nodes, hidden=model.hidden) -> Calls:
            x, residual = torch.randn(rows, hidden, device=device).to(dtype), torch.zeros(rows, hidden, dtype=dtype, device=device)
            weight, out = torch.ones(hidden, device=device), torch.empty_like(x)
            like = weight.to(dtype)

            def baseline() -> torch.Tensor:
                residual.add_(x)
                return functional.rms_norm(residual, (hidden,), like, 1e-5)

            return Calls(lambda: rms_norm(x, weight, 1e-5, residual, out=out), baseline)

        numbers = tree.nodes * model.hidden
        # x and residual read, residual and result written.
        result.append(Case("rms_norm", name, 4 * numbers * dtype.itemsize + 4 * model.hidden, 4 * numbers, make))
    return result


def test_rms_norm(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
