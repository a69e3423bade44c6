"""eagle_kernels.tree_attention against PyTorch's scaled_dot_product_attention, over prefix length and tree size.

The caches of a model's layers take turns, as they do in a step; where all of them together are larger than the last-level cache, every call reads its keys and values
from memory. PyTorch is given contiguous keys and values and a ready boolean mask: neither the paged gather nor building the mask is in its time.
"""

import argparse
import random
from typing import NamedTuple

import torch
from eagle_kernels import reference, tree_attention
from timing import COLUMNS, columns, header, last_level_cache_bytes, measure_ceilings, measures, median_seconds, parse_args, print_json

PAGE_SIZE = 16
NODES = (1, 8, 16, 64)


class Shape(NamedTuple):
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int


SHAPES = {"smollm2-135m": Shape(9, 3, 64, 30), "llama-3.1-8b": Shape(32, 8, 128, 32)}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", type=int, action="append", metavar="N", help="committed rows; may be given several times (default: 128, 1024 and 4096)")


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], rounds=5, add=options)
    ceilings = measure_ceilings()
    rows = [row for name, shape in SHAPES.items() for prefix in args.prefix or (128, 1024, 4096) for row in bench(name, shape, prefix, args.rounds, ceilings)]
    if args.json:
        print_json({"threads": torch.get_num_threads(), **ceilings._asdict(), "rows": rows})
        return
    print(header(ceilings))
    print(f"tree_attention, fp32 cache, pages of {PAGE_SIZE} rows, random trees; times of one layer are medians of {args.rounds} runs that take turns; bytes: keys and values once, queries, output")
    print(f"{'shape':<14}{'prefix':>7}{'nodes':>6}{'cache':>6}{COLUMNS}")
    for row in rows:
        print(f"{row['shape']:<14}{row['prefix']:>7}{row['nodes']:>6}{'cold' if row['cold'] else 'warm':>6}{columns(row)}")


def bench(name: str, shape: Shape, prefix: int, rounds: int, ceilings) -> list[dict]:
    length = prefix + max(NODES)
    bytes_per_layer = 2 * length * shape.kv_heads * shape.head_dim * 4
    # As many layers as it takes to push each other out of the cache, but no more than the model has.
    layers = min(shape.layers, -(-2 * last_level_cache_bytes() // bytes_per_layer) + 1)
    pages = -(-length // PAGE_SIZE)
    order = torch.randperm(pages)
    caches = torch.randn(layers, 2, pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    page_table = order.to(torch.int32)[None]
    seq_lens = torch.tensor([prefix], dtype=torch.int32)
    flat = caches[:, :, order].flatten(2, 3)[:, :, :length].permute(0, 1, 3, 2, 4).contiguous()  # [layers, 2, kv_heads, length, head_dim]
    calls = {}
    for nodes in NODES:
        mask = random_tree(nodes)
        packed = reference.pack_ancestor_mask(mask)
        q = torch.randn(1, nodes, shape.q_heads, shape.head_dim)
        out = torch.empty_like(q)
        seen = torch.cat((torch.ones(nodes, prefix, dtype=torch.bool), mask[0]), dim=1)
        calls["ours", nodes] = all_layers(layers, lambda i, q=q, packed=packed, out=out: tree_attention(q, caches[i], page_table, seq_lens, packed, out=out))
        calls["torch", nodes] = all_layers(
            layers,
            lambda i, q=q.transpose(1, 2).contiguous(), seen=seen: torch.nn.functional.scaled_dot_product_attention(
                q, flat[i, 0, None, :, : seen.shape[1]], flat[i, 1, None, :, : seen.shape[1]], seen, enable_gqa=True
            ),
        )
    seconds = median_seconds(calls, rounds)
    rows = []
    for nodes in NODES:
        num_bytes = 2 * (prefix + nodes) * shape.kv_heads * shape.head_dim * 4 + 2 * nodes * shape.q_heads * shape.head_dim * 4
        flops = 4 * nodes * (prefix + nodes) * shape.q_heads * shape.head_dim
        ours, torch_seconds = (seconds[who, nodes] / layers for who in ("ours", "torch"))
        row = measures(ours, num_bytes, flops, ceilings, torch_seconds)
        rows.append({"shape": name, "prefix": prefix, "nodes": nodes, "cold": layers * bytes_per_layer > last_level_cache_bytes()} | row)
    return rows


def random_tree(nodes: int) -> torch.Tensor:
    """Ancestor mask [1, nodes, nodes]: a row is its parent's row and itself."""
    pick, mask = random.Random(nodes), torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[pick.randrange(node)]
    return mask[None]


def all_layers(layers: int, call):
    def every() -> None:
        for i in range(layers):
            call(i)

    return every


if __name__ == "__main__":
    main()
