"""Floors of one speculative step, from shapes alone: bytes over bandwidth, operations over rate, and where the time must go.

    python bench/roofline.py --model llama-3.1-8b --device h200 --num-nodes 60 --max-depth 6
"""

import argparse
import json
from typing import NamedTuple

from shapes import DEVICES, MODELS, Device, ModelShape

# What a kernel costs inside a graph however little it does: 1.3 us on an H100 (Hazy Research, "Look Ma, No Bubbles", 2025).
LAUNCH_SECONDS = 1.3e-6
DRAFTERS = ("eagle-1", "eagle-3")


class Part(NamedTuple):
    """One kind of work of a step: `count` times num_bytes and flops, in `launches` kernels each."""

    name: str
    count: int
    num_bytes: int
    flops: int
    launches: int

    def seconds(self, device: Device) -> float:
        """The floor of all `count` of them. Launches overlap with nothing but each other, so they bound it too."""
        return self.count * max(self.num_bytes / device.bandwidth, self.flops / device.flops, self.launches * LAUNCH_SECONDS)

    def bound(self, device: Device) -> str:
        costs = {"bytes": self.num_bytes / device.bandwidth, "operations": self.flops / device.flops, "launches": self.launches * LAUNCH_SECONDS}
        return max(costs, key=costs.get)


def matrices(name: str, count: int, weights: int, rows: int, launches: int) -> Part:
    """Products of `rows` rows with 16-bit weights; activations are left out: at 64 rows they are below 1 % of the weights."""
    return Part(name, count, 2 * weights, 2 * weights * rows, launches)


def attention(name: str, count: int, shape: ModelShape, layers: int, rows: int, context: int) -> Part:
    """Keys and values read once, q k and p v; three launches: two kernels and the store of the new keys."""
    return Part(name, count, layers * shape.layer_kv_bytes_per_token * (context + rows), layers * 4 * rows * (context + rows) * shape.q_heads * shape.head_dim, 3 * layers)


def plain_step(shape: ModelShape, context: int) -> list[Part]:
    return target_forward(shape, 1, context) + [Part("sample", 1, 4 * shape.vocab, 0, 1)]


def target_forward(shape: ModelShape, rows: int, context: int) -> list[Part]:
    # Per layer four products, two norms and the activation.
    return [
        matrices("target layers", 1, shape.layers * shape.layer_weights, rows, 7 * shape.layers),
        attention("target attention", 1, shape, shape.layers, rows, context),
        matrices("target head", 1, shape.head_weights, rows, 1),
    ]


class DraftCost(NamedTuple):
    """What a drafter of the target's own shape costs besides its attention.

    fuse     numbers in the matrix that only the draft-extend multiplies with, the captured states' fc
    layer    numbers in the other matrices of a draft forward
    head     launches of a head
    states   captured states per token that the target hands over
    """

    fuse: int
    layer: int
    layer_launches: int
    head: int
    states: int


def draft_cost(shape: ModelShape, drafter: str) -> DraftCost:
    """EAGLE-1/2: fc of a pair, then a layer. EAGLE-3: fc of three states, then a layer whose q, k and v are twice as wide; three norms more, one of them before the head."""
    square = shape.hidden * shape.hidden
    if drafter == "eagle-1":
        return DraftCost(0, 2 * square + shape.layer_weights, 9, 1, 1)
    qkv = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim * shape.hidden
    return DraftCost(3 * square, qkv + shape.layer_weights, 10, 2, 3)


def speculative_step(shape: ModelShape, num_nodes: int, max_depth: int, top_k: int, context: int, draft_vocab: int, drafter: str = "eagle-1") -> list[Part]:
    """EAGLE-2's tree: max_depth expansions; the first draft forward runs the accepted rows, each later one top_k nodes."""
    cost = draft_cost(shape, drafter)
    levels = max_depth - 1
    capture = Part("capture", cost.states, 2 * num_nodes * shape.hidden * 2, 0, 1)
    parts = [
        matrices("draft-extend layer", 1, cost.fuse + cost.layer, max_depth + 1, cost.layer_launches + (cost.fuse > 0)),
        attention("draft-extend attention", 1, shape, 1, max_depth + 1, context),
        matrices("draft level layer", levels, cost.layer, top_k, cost.layer_launches),
        attention("draft level attention", levels, shape, 1, top_k, context),
        matrices("draft head", max_depth, draft_vocab * shape.hidden, top_k, cost.head),
        Part("expand", max_depth, 8 * top_k * top_k + 2 * top_k * shape.hidden * 2, 0, 1),
        Part("rerank", 1, 16 * (top_k + levels * top_k * top_k), 0, 1),
    ]
    rest = [
        Part("sample", 1, 4 * num_nodes * shape.vocab, 0, 1),
        Part("accept", 1, 32 * num_nodes, 0, 1),
        Part("compact", 1, 2 * (max_depth + 1) * shape.kv_bytes_per_token, 0, 1),
        Part("advance", 1, 2 * (max_depth + 1) * cost.states * shape.hidden * 2, 0, 1),
    ]
    return [part for part in parts if part.count] + target_forward(shape, num_nodes, context) + ([capture] if drafter == "eagle-3" else []) + rest


def floor_seconds(parts: list[Part], device: Device) -> float:
    return sum(part.seconds(device) for part in parts)


def default_draft_vocab(args: argparse.Namespace, shape: ModelShape) -> int:
    """Published EAGLE-3 drafters have 32000 tokens, EAGLE-1/2 drafters the target's."""
    return args.draft_vocab or (min(32000, shape.vocab) if args.drafter == "eagle-3" else shape.vocab)


def report(args: argparse.Namespace) -> dict:
    shape, device = MODELS[args.model], DEVICES[args.device]
    draft_vocab = default_draft_vocab(args, shape)
    plain = plain_step(shape, args.context)
    speculative = speculative_step(shape, args.num_nodes, args.max_depth, args.top_k, args.context, draft_vocab, args.drafter)
    plain_seconds, step_seconds = floor_seconds(plain, device), floor_seconds(speculative, device)
    return {
        "plain": plain,
        "speculative": speculative,
        "plain_seconds": plain_seconds,
        "step_seconds": step_seconds,
        "step_over_plain": step_seconds / plain_seconds,
        "tokens_per_second": args.acceptance_length / step_seconds,
        "plain_tokens_per_second": 1.0 / plain_seconds,
    }


def print_parts(title: str, parts: list[Part], device: Device) -> None:
    total = floor_seconds(parts, device)
    print(f"\n{title}\n{'part':<24}{'times':>6}{'MB':>11}{'GFLOP':>10}{'launches':>10}{'floor us':>11}{'share':>8}  bound by")
    for part in parts:
        seconds = part.seconds(device)
        print(
            f"{part.name:<24}{part.count:>6}{part.count * part.num_bytes / 1e6:>11.3f}{part.count * part.flops / 1e9:>10.2f}{part.count * part.launches:>10}{seconds * 1e6:>11.1f}{seconds / total:>8.1%}  {part.bound(device)}"
        )
    print(f"{'all':<24}{'':>6}{sum(p.count * p.num_bytes for p in parts) / 1e6:>11.3f}{sum(p.count * p.flops for p in parts) / 1e9:>10.2f}{sum(p.count * p.launches for p in parts):>10}{total * 1e6:>11.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--num-nodes", type=int, default=60, metavar="N", help="nodes of the tree, the root included (default: %(default)s)")
    parser.add_argument("--max-depth", type=int, default=6, metavar="N", help="greatest depth of a node (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help="nodes of a draft level (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="committed rows (default: %(default)s)")
    parser.add_argument("--draft-vocab", type=int, metavar="N", help="rows of the draft head (default: the whole vocabulary; EAGLE-3: 32000)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="eagle-1", help="eagle-1 stands for EAGLE-2 too, whose weights are the same (default: %(default)s)")
    parser.add_argument("--acceptance-length", type=float, default=4.0, metavar="X", help="tokens per step, for tokens per second (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    for name in ("num_nodes", "max_depth", "top_k", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    result = report(args)
    device = DEVICES[args.device]
    if args.json:
        print(json.dumps(result | {name: [part._asdict() | {"seconds": part.seconds(device)} for part in result[name]] for name in ("plain", "speculative")}))
        return
    print(f"{args.model} on {args.device}: {device.bandwidth / 1e12:g} TB/s, {device.flops / 1e12:g} TFLOP/s, data sheet; 16-bit weights; context {args.context}")
    print_parts("Plain step", result["plain"], device)
    print_parts(f"Speculative step, {args.drafter}, {args.num_nodes} nodes, max_depth {args.max_depth}, top_k {args.top_k}", result["speculative"], device)
    print(f"\nplain step       {result['plain_seconds'] * 1e3:.3f} ms, {result['plain_tokens_per_second']:.0f} tokens/s")
    print(f"speculative step {result['step_seconds'] * 1e3:.3f} ms = {result['step_over_plain']:.2f} plain steps: pays above {result['step_over_plain']:.2f} tokens per step")
    print(f"at {args.acceptance_length:g} tokens per step: {result['tokens_per_second']:.0f} tokens/s, {result['tokens_per_second'] * result['plain_seconds']:.2f} times plain")


if __name__ == "__main__":
    main()
