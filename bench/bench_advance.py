"""advance against PyTorch's gather of the accepted features and tokens, without the counters."""

import torch
from cases import WORKLOADS, Calls, Case, activation_dtype, main, on, under_pytest

from eagle_kernels import Accepted, advance


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():
        width = tree.max_depth + 1

        def make(i: int, model=model, tree=tree, width=width) -> Calls:
            tokens, features = on(device, torch.randint(model.vocab, (1, tree.nodes)), torch.randn(1, tree.nodes, model.hidden).to(dtype))
            path = torch.arange(width, dtype=torch.int32)[None]
            accepted = Accepted(*on(device, path, torch.tensor([width - 1], dtype=torch.int32), torch.tensor([7])))
            active, seq_lens, root, pending = on(device, torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.int32), torch.tensor([5]), torch.tensor([1]))
            pending_tokens, pending_features = on(device, torch.zeros(1, width, dtype=torch.int64), torch.zeros(1, width, model.hidden, dtype=dtype))
            index = accepted.accepted_nodes[0].long()

            def gather() -> None:
                pending_features.copy_(features[:, index])
                pending_tokens.copy_(tokens[:, index])

            return Calls(lambda: advance(tokens, features, accepted, active, seq_lens, root, pending, pending_tokens, pending_features), gather)

        # Each accepted row: its feature and its token, read and written.
        result.append(Case("advance", name, 2 * width * (model.hidden * dtype.itemsize + 8), 0, make))
    return result


def test_advance(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
