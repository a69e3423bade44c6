"""eagle_kernels.linear against torch.nn.functional.linear, over the number of rows.

The weights are larger than the last-level cache (or take turns with copies that are), so every call reads them from memory. torch multiplies in the dtype of the weights. On the CPU linear takes
fp32 activations and accumulates in fp32; on CUDA it is measured as cuBLAS and, "deterministic", as our row-invariant kernel.
"""

import argparse
import json

import torch
from cases import Calls, Case, Shared, activation_dtype, how, run_cases, under_pytest
from shapes import MODELS
from timing import COLUMNS, columns, header, last_level_cache_bytes, measure_ceilings, parse_args, print_json

from eagle_kernels import linear, pack_weight

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHARED = Shared()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-features", type=int, default=2048, metavar="K", help="default: %(default)s")
    parser.add_argument("--out-features", type=int, metavar="N", help="default: enough for fp32 weights of twice the last-level cache")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of the weights; may be given twice (default: both; on CUDA bf16)")
    parser.add_argument("--no-torch", action="store_true", help="leave out the comparison")


def cases_of(device: str, label: str, n: int, k: int, dtype_name: str, rows: tuple[int, ...], deterministic: bool, with_torch: bool = True) -> list[Case]:
    """One case for each number of rows; they share the weights and take turns."""
    dtype, result = DTYPES[dtype_name], []
    group = f"{label} {dtype_name}{' deterministic' if deterministic else ''}"
    weight_bytes = n * k * dtype.itemsize
    for count in rows:

        def make(i: int, count=count) -> Calls:
            weight, packed = SHARED.get((group, device), i, lambda: weights(n, k, dtype, device))
            x = torch.randn(count, k, device=device).to(activation_dtype(device))
            out, y = torch.empty(count, n, dtype=x.dtype, device=device), x.to(dtype)
            return Calls(lambda: linear(x, packed, deterministic=deterministic, out=out), (lambda: torch.nn.functional.linear(y, weight)) if with_torch else None)

        num_bytes = weight_bytes + count * (n + k) * activation_dtype(device).itemsize
        result.append(Case("linear", f"{group} M={count}", num_bytes, 2 * count * n * k, make, cold=True, group=group, fields={"rows": count, "weight_bytes": weight_bytes}))
    return result


def weights(n: int, k: int, dtype: torch.dtype, device: str):
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    return weight, pack_weight(weight)


def cases(device: str) -> list[Case]:
    """The products of a layer, as a step has them."""
    result = []
    for name in ("smollm2-135m", "llama-3.1-8b"):
        m = MODELS[name]
        heads, kv = m.q_heads * m.head_dim, m.kv_heads * m.head_dim
        for matrix, n, k in (("qkv", heads + 2 * kv, m.hidden), ("o", m.hidden, heads), ("gate_up", 2 * m.intermediate, m.hidden), ("down", m.hidden, m.intermediate)):
            for deterministic in (False, True) if device == "cuda" else (True,):
                result += cases_of(device, f"{name} {matrix}", n, k, "bf16", (1, 8, 60), deterministic)
    return result


def bench(args: argparse.Namespace, name: str, deterministic: bool, n: int, ceilings) -> list[dict]:
    table = run_cases(cases_of(args.device, f"[{n}, {args.in_features}]", n, args.in_features, name, ROWS, deterministic, not args.no_torch), args.rounds, args.device, ceilings)
    for row in table:
        row["ratio_to_m1"] = row["microseconds"] / table[0]["microseconds"]
    return table


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], rounds=9, add=options)
    k = args.in_features
    n = args.out_features or -(-2 * last_level_cache_bytes(args.device) // (4 * k) // 512) * 512
    ceilings = measure_ceilings(args.device)
    names = args.dtype or (["bf16"] if args.device == "cuda" else list(DTYPES))
    kinds = [(name, deterministic) for name in names for deterministic in ((False, True) if args.device == "cuda" else (True,))]
    results = {name + ("-deterministic" if args.device == "cuda" and exact else ""): bench(args, name, exact, n, ceilings) for name, exact in kinds}
    first = results.get("fp32") or next(iter(results.values()))
    ratios = {f"ratio_m{rows}": next(row["ratio_to_m1"] for row in first if row["rows"] == rows) for rows in (8, 16)}
    result = ratios | {"threads": torch.get_num_threads(), "in_features": k, "out_features": n, **ceilings._asdict(), **results}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1))
    if args.json:
        print_json(result)
        return
    print(header(ceilings, args.device))
    print(how(args.device))
    for name, table in results.items():
        cache = "cold: read from memory by every call" if table[0]["cold"] else "warm: the cache holds them"
        print(f"\nlinear, {name} weight [{n}, {k}], {table[0]['weight_bytes'] / 1e6:.0f} MB, {cache}; times are medians of {args.rounds} runs that take turns")
        print(f"{'M':>4}{COLUMNS}{'to M = 1':>10}")
        for row in table:
            print(f"{row['rows']:>4}{columns(row)}{row['ratio_to_m1']:>10.2f}")


def test_linear(benchmark, case, device):
    under_pytest(benchmark, case, device)


if __name__ == "__main__":
    main()
