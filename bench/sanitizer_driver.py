"""Calls every CUDA C++ op once on small shapes, several blocks and odd sizes, and compares with the references: what compute-sanitizer looks at in bench/gpu_check.sh.

    compute-sanitizer --tool racecheck python bench/sanitizer_driver.py --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from eagle_kernels import DraftPool, accept, compact, expand_topk, reference, rerank

CUDA_OPS = ("expand_topk", "rerank", "accept", "compact")


def check_build() -> None:
    """The extension that was built holds the CUDA C++ kernels."""
    for op in CUDA_OPS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"eagle_kernels::{op}", "CUDA"):
            raise SystemExit(f"eagle_kernels::{op}: expected a CUDA kernel in the extension, got none")


def to(value: object, device: str) -> object:
    """A copy on the device, of tensors and of tuples of them."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    return type(value)(*(to(item, device) for item in value)) if isinstance(value, tuple) else value


def compare(name: str, op: Callable[..., object], arguments: dict[str, object], device: str) -> None:
    """Results and modified arguments of the op on the device have the reference's bytes."""
    there, here = ({key: to(value, where) for key, value in arguments.items()} for where in (device, "cpu"))
    results = [op(**there), getattr(reference, name)(**here)]
    pairs = list(zip(*(flatten([result, *values.values()]) for result, values in zip(results, (there, here))), strict=True))
    for actual, expected in pairs:
        if actual.shape != expected.shape or not torch.equal(as_bytes(actual.cpu()), as_bytes(expected)):
            raise SystemExit(f"{name}: differs from the reference")
    print(f"{name}: {len(pairs)} tensors equal")


def flatten(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flatten(item)] if isinstance(value, (tuple, list)) else []


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def random_pool(batch: int, size: int) -> DraftPool:
    """Parents before children, scores that fall along every path."""
    parents = torch.stack([torch.randint(-1, max(slot, 1), (batch,)) if slot else torch.full((batch,), -1) for slot in range(size)], 1)
    scores = torch.zeros(batch, size)
    for slot in range(size):
        parent = parents[:, slot]
        scores[:, slot] = torch.where(parent >= 0, scores.gather(1, parent.clamp(min=0)[:, None])[:, 0], 0.0) - torch.rand(batch) - 0.01
    return DraftPool(torch.randint(0, 1000, (batch, size)), scores, parents.int())


def run(device: str) -> None:
    torch.manual_seed(1)
    batch, frontier, top_k, vocab, hidden = 2, 5, 5, 3001, 40
    pool = random_pool(batch, 90)
    arguments = {
        "head": reference.logits_topk(torch.randn(batch, frontier, vocab), top_k, tile=64), "frontier_scores": -torch.rand(batch, frontier), "frontier_pool_index": torch.arange(frontier, dtype=torch.int32).repeat(batch, 1),
        "features": torch.randn(batch, frontier, hidden).bfloat16(), "frontier_mask": torch.randint(0, 2**40, (batch, frontier, 1)), "pool": pool, "pool_offset": 10, "top_k": top_k,
        "first_row": 6, "next_size": 5,
    }  # fmt: skip
    compare("expand_topk", expand_topk, arguments, device)

    seq_lens = torch.tensor([61, 7], dtype=torch.int32)
    for num_nodes in (60, 85):
        compare("rerank", rerank, {"pool": pool, "root_tokens": torch.tensor([3, 4]), "seq_lens": seq_lens, "num_nodes": num_nodes}, device)

    tree = reference.rerank(pool, torch.tensor([3, 4]), seq_lens, 60)
    sampled = torch.randint(0, 1000, (batch, 60))
    for node in range(59, 0, -1):  # the target draws the first child everywhere: a long walk
        for b in range(batch):
            sampled[b, tree.parent[b, node]] = tree.tokens[b, node]
    stops, ring = torch.full((batch, 4), -1), torch.zeros(batch, 33, dtype=torch.int64)
    stops[1, 2] = sampled[1, 0]
    options = {"stop_token_ids": stops, "output_ring": ring}
    compare("accept", accept, {"tokens": tree.tokens, "parent": tree.parent, "sampled": sampled, "active": torch.ones(batch, dtype=torch.bool), "max_depth": 7} | options, device)

    cache = torch.randn(3, 2, 20, 16, 2, 20).bfloat16()
    table = torch.randperm(20, dtype=torch.int32).view(2, 10)
    accepted = torch.tensor([[0, 2, 3, 4, 40, -1, -1, -1], [0, 59, -1, -1, -1, -1, -1, -1]], dtype=torch.int32)  # the first overlaps what it is moved over
    arguments = {"kv_cache": cache, "page_table": table, "seq_lens": seq_lens, "accepted_nodes": accepted, "num_accepted_drafts": torch.tensor([4, 1], dtype=torch.int32)}
    compare("compact", compact, arguments, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--check-build", action="store_true", help="only look whether the extension has the CUDA kernels")
    args = parser.parse_args()
    if args.check_build:
        check_build()
    else:
        run(args.device)


if __name__ == "__main__":
    main()
