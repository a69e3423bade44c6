"""eagle_kernels.linear against torch.nn.functional.linear, over the number of rows.

The weights are larger than the last-level cache, so every call reads them from memory. torch multiplies in the dtype of the weights (bf16 activations with bf16
weights); linear always takes fp32 activations and accumulates in fp32.
"""

import argparse

import torch
from eagle_kernels import linear, pack_weight
from timing import COLUMNS, columns, header, last_level_cache_bytes, measure_ceilings, measures, median_seconds, parse_args, print_json

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-features", type=int, default=2048, metavar="K", help="default: %(default)s")
    parser.add_argument("--out-features", type=int, metavar="N", help="default: enough for fp32 weights of twice the last-level cache")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of the weights; may be given twice (default: both)")
    parser.add_argument("--no-torch", action="store_true", help="leave out the comparison")


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], rounds=9, add=options)
    k = args.in_features
    n = args.out_features or -(-2 * last_level_cache_bytes() // (4 * k) // 512) * 512
    ceilings = measure_ceilings()
    results = {name: bench(DTYPES[name], n, k, args.rounds, not args.no_torch, ceilings) for name in args.dtype or DTYPES}
    if args.json:
        first = results.get("fp32") or next(iter(results.values()))
        ratios = {f"ratio_m{rows}": next(row["ratio_to_m1"] for row in first if row["rows"] == rows) for rows in (8, 16)}
        print_json(ratios | {"threads": torch.get_num_threads(), "in_features": k, "out_features": n, **ceilings._asdict(), **results})
        return
    print(header(ceilings))
    for name, table in results.items():
        print(f"\nlinear, {name} weight [{n}, {k}], {table[0]['weight_bytes'] / 1e6:.0f} MB, cold: read from memory by every call; times are medians of {args.rounds} runs that take turns")
        print(f"{'M':>4}{COLUMNS}{'to M = 1':>10}")
        for row in table:
            print(f"{row['rows']:>4}{columns(row)}{row['ratio_to_m1']:>10.2f}")


def bench(dtype: torch.dtype, n: int, k: int, rounds: int, with_torch: bool, ceilings) -> list[dict]:
    weight = (torch.randn(n, k) / k**0.5).to(dtype)
    packed = pack_weight(weight)
    calls = {}
    for rows in ROWS:
        x = torch.randn(rows, k)
        out = torch.empty(rows, n)
        calls["ours", rows] = lambda x=x, out=out: linear(x, packed, out=out)
        if with_torch:
            calls["torch", rows] = lambda x=x.to(dtype): torch.nn.functional.linear(x, weight)
    seconds = median_seconds(calls, rounds)
    table = []
    for rows in ROWS:
        num_bytes = packed.data.nbytes + 4 * rows * (n + k)
        row = measures(seconds["ours", rows], num_bytes, 2 * rows * n * k, ceilings, seconds.get(("torch", rows)))
        table.append({"rows": rows, "weight_bytes": packed.data.nbytes, "ratio_to_m1": seconds["ours", rows] / seconds["ours", 1]} | row)
    return table


if __name__ == "__main__":
    main()
