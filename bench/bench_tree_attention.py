"""eagle_kernels.tree_attention against PyTorch's scaled_dot_product_attention, over prefix length and tree size.

Caches take turns, as those of a model's layers do in a step; where all of them together are larger than the last-level cache, every call reads its keys and values from memory. PyTorch is given
contiguous keys and values and a ready boolean mask: neither the paged gather nor building the mask is in its time. flash-attn and FlashInfer are given a contiguous causal chunk of as many queries,
which is less than a tree asks for.
"""

import argparse
import importlib.util
import json

import torch
from cases import WORKLOADS, Calls, Case, Shared, activation_dtype, how, on, other_baselines, run_cases, under_pytest
from shapes import ModelShape
from timing import COLUMNS, columns, header, measure_ceilings, parse_args, print_json
from tree_inputs import ancestor_mask
from torch.nn.functional import scaled_dot_product_attention

from eagle_kernels import reference, tree_attention

PAGE_SIZE = 16
NODES = (1, 8, 16, 64)
PREFIXES = {"cpu": (128, 1024, 4096), "cuda": (1024, 8192, 32768)}
SHARED = Shared()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", type=int, action="append", metavar="N", help="committed rows; may be given several times (default: 128, 1024 and 4096; on CUDA 1024, 8192 and 32768)")
    parser.add_argument("--deterministic", action="store_true", help="CUDA: the row-invariant form")
    parser.add_argument("--only", action="append", metavar="TEXT", help="only shapes whose name contains this")


def caches(model: ModelShape, length: int, device: str) -> tuple[torch.Tensor, ...]:
    """A paged cache in shuffled order, its page table, and the same keys and values contiguous, [2, kv_heads, length, head_dim]."""
    pages = -(-length // PAGE_SIZE)
    kv = torch.randn(2, pages, PAGE_SIZE, model.kv_heads, model.head_dim, device=device).to(activation_dtype(device))
    (order,) = on(device, torch.randperm(pages))
    return kv, order.to(torch.int32)[None], kv[:, order].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()


def cases_of(device: str, name: str, model: ModelShape, prefix: int, deterministic: bool = False) -> list[Case]:
    result, dtype = [], activation_dtype(device)
    for nodes in NODES:

        def make(i: int, nodes=nodes) -> Calls:
            kv, page_table, flat = SHARED.get((name, prefix, device), i, lambda: caches(model, prefix + max(NODES), device))
            mask = ancestor_mask(nodes)
            seen = torch.cat((torch.ones(nodes, prefix, dtype=torch.bool), mask[0]), dim=1)
            packed, seen, seq_lens = on(device, reference.pack_ancestor_mask(mask), seen, torch.tensor([prefix], dtype=torch.int32))
            q = torch.randn(1, nodes, model.q_heads, model.head_dim, device=device).to(dtype)
            out, heads_first = torch.empty_like(q), q.transpose(1, 2).contiguous()
            keys, values = flat[:, None, :, : prefix + nodes]
            others = {}
            if device == "cuda" and importlib.util.find_spec("flash_attn"):
                import flash_attn

                rows = [x.transpose(1, 2).contiguous() for x in (keys, values)]
                others["flash_attn"] = lambda: flash_attn.flash_attn_func(q, *rows, causal=True)
            if device == "cuda" and importlib.util.find_spec("flashinfer"):
                import flashinfer

                flat_rows = [x[0].transpose(0, 1).contiguous() for x in (keys, values)]
                others["flashinfer"] = lambda: flashinfer.single_prefill_with_kv_cache(q[0], *flat_rows, causal=True)
            return Calls(
                lambda: tree_attention(q, kv, page_table, seq_lens, packed, deterministic=deterministic, out=out),
                lambda: scaled_dot_product_attention(heads_first, keys, values, seen, enable_gqa=True),
                others,
            )

        num_bytes = 2 * (prefix + nodes) * model.kv_heads * model.head_dim * dtype.itemsize + 2 * nodes * model.q_heads * model.head_dim * dtype.itemsize
        flops = 4 * nodes * (prefix + nodes) * model.q_heads * model.head_dim
        fields = {"shape": name, "prefix": prefix, "nodes": nodes}
        label = f"{name} prefix {prefix} nodes {nodes}{' deterministic' if deterministic else ''}"
        result.append(Case("tree_attention", label, num_bytes, flops, make, cold=True, group=f"{name} {prefix}", fields=fields))
    return result


def cases(device: str) -> list[Case]:
    return [case for exact in ((False, True) if device == "cuda" else (False,)) for name, (model, _) in WORKLOADS.items() for prefix in PREFIXES[device] for case in cases_of(device, name, model, prefix, exact)]


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], rounds=5, add=options)
    ceilings = measure_ceilings(args.device)
    names = [name for name in WORKLOADS if not args.only or any(text in name for text in args.only)]
    chosen = [case for name in names for prefix in args.prefix or PREFIXES[args.device] for case in cases_of(args.device, name, WORKLOADS[name][0], prefix, args.deterministic)]
    rows = run_cases(chosen, args.rounds, args.device, ceilings)
    result = {"threads": torch.get_num_threads(), **ceilings._asdict(), "rows": rows}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1))
    if args.json:
        print_json(result)
        return
    print(header(ceilings, args.device))
    kind = str(activation_dtype(args.device)).removeprefix("torch.")
    print(f"tree_attention, {kind} cache, pages of {PAGE_SIZE} rows, random trees; times of one layer are medians of {args.rounds} runs that take turns; bytes: keys and values once, queries, output")
    print(f"{how(args.device)}. {other_baselines(args.device)}".rstrip())
    print(f"{'shape':<14}{'prefix':>7}{'nodes':>6}{'cache':>6}{COLUMNS}")
    for row in rows:
        print(f"{row['shape']:<14}{row['prefix']:>7}{row['nodes']:>6}{'cold' if row['cold'] else 'warm':>6}{columns(row)}")


def test_tree_attention(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main()
