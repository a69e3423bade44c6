"""sample over the logits of a tree against PyTorch's argmax, and its softmax with sort or topk and a draw."""

import torch
from cases import WORKLOADS, Calls, Case, main, under_pytest

from eagle_kernels import sample

# name -> temperature, top_k, top_p
FILTERS = {"greedy": (0.0, 0, 1.0), "temperature": (0.8, 0, 1.0), "top_k 50": (0.8, 50, 1.0), "top_p 0.9": (0.8, 0, 0.9)}


def draw_one(probs: torch.Tensor) -> torch.Tensor:
    """[R, 1]. On CUDA by a race of exponential clocks, since multinomial may look at the values on the host, which a graph cannot capture."""
    if probs.is_cuda:
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
    return torch.multinomial(probs, 1)


def draw(logits: torch.Tensor) -> torch.Tensor:
    return draw_one(torch.softmax(logits / 0.8, -1))


def draw_top_k(logits: torch.Tensor) -> torch.Tensor:
    values, ids = torch.topk(logits / 0.8, 50)
    return ids.gather(1, draw_one(torch.softmax(values, -1)))


def draw_top_p(logits: torch.Tensor) -> torch.Tensor:
    values, ids = torch.sort(logits / 0.8, descending=True)
    probs = torch.softmax(values, -1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= 0.9, 0.0)
    return ids.gather(1, draw_one(probs))


BASELINES = {"greedy": lambda logits: logits.argmax(-1), "temperature": draw, "top_k 50": draw_top_k, "top_p 0.9": draw_top_p}


def cases(device: str) -> list[Case]:
    result = []
    for name, (model, tree) in WORKLOADS.items():
        for kind, (temperature, top_k, top_p) in FILTERS.items():

            def make(i: int, rows=tree.nodes, vocab=model.vocab, kind=kind, temperature=temperature, top_k=top_k, top_p=top_p) -> Calls:
                logits = 3 * torch.randn(rows, vocab, device=device)
                full = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype, device=device)  # noqa: E731
                parameters = (full(temperature), full(top_k, torch.int32), full(top_p), full(0.0))
                seeds = torch.arange(rows, device=device)
                positions = seeds + 100
                return Calls(lambda: sample(logits, *parameters, seeds, positions), lambda: BASELINES[kind](logits))

            result.append(Case("sample", f"{name} {kind}", 4 * tree.nodes * model.vocab, 0, make))
    return result


def test_sample(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main(__doc__, cases)
