"""head_topk, the draft head without its logits, against PyTorch's product, topk and logsumexp; and logits_topk, of given logits."""

import torch
from cases import WORKLOADS, Calls, Case, Shared, activation_dtype, main, under_pytest
from torch.nn import functional

from eagle_kernels import head_topk, logits_topk, pack_weight

SHARED = Shared()


def statistics(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    return *logits.topk(k), logits.float().logsumexp(-1)


def cases(device: str) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for name, (model, tree) in WORKLOADS.items():
        rows, k = tree.top_k, tree.top_k

        def of_head(i: int, name=name, model=model, tree=tree, rows=rows, k=k) -> Calls:
            weight = SHARED.get(name, i, lambda: torch.randn(tree.draft_vocab, model.hidden, device=device).to(dtype))
            packed = pack_weight(weight)
            features = torch.randn(rows, model.hidden, device=device).to(dtype)
            return Calls(lambda: head_topk(features, packed, k), lambda: statistics(functional.linear(features, weight), k))

        def of_logits(i: int, tree=tree, rows=rows, k=k) -> Calls:
            logits = torch.randn(rows, tree.draft_vocab, device=device)
            return Calls(lambda: logits_topk(logits, k), lambda: statistics(logits, k))

        weights = tree.draft_vocab * model.hidden
        result.append(Case("head_topk", name, (weights + rows * model.hidden) * dtype.itemsize, 2 * rows * weights, of_head, cold=True))
        result.append(Case("logits_topk", name, 4 * rows * tree.draft_vocab, 0, of_logits))
    return result


def test_head_topk(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
