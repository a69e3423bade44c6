"""The small ops of a step (sample, expand, expand_topk, rerank, accept, compact, rms_norm, silu_mul, rope_store_kv) against PyTorch, at the shapes of two models.

Everything is warm (in a step these ops read what the op before them wrote), so the share of the memory's bandwidth can pass 100 %. Launch cost is included; each
sample repeats the call for about a millisecond. Where no single PyTorch expression does the same (accept), there is no comparison.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from eagle_kernels import DraftPool, HeadTopK, accept, compact, expand, expand_topk, logits_topk, rerank, rms_norm, rope_store_kv, sample, silu_mul
from timing import COLUMNS, columns, header, measure_ceilings, measures, median_seconds, parse_args, print_json, repeat
from torch.nn import functional

PAGE_SIZE, PREFIX, ACCEPTED = 16, 1024, 4


class Shape(NamedTuple):
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    draft_vocab: int
    nodes: int
    top_k: int
    max_depth: int


SHAPES = {
    "smollm2-135m": Shape(576, 1536, 9, 3, 64, 30, 49152, 8192, 8, 4, 4),
    "llama-3.1-8b": Shape(4096, 14336, 32, 8, 128, 32, 128256, 128256, 60, 10, 6),
}


class Case(NamedTuple):
    op: str
    ours: Callable[[], object]
    torch: Callable[[], object] | None
    num_bytes: int
    flops: int


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", action="append", metavar="NAME", help="only ops whose name starts so; may be given several times")


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], rounds=15, add=options)
    ceilings = measure_ceilings()
    rows = []
    for name, shape in SHAPES.items():
        cases = [case for make in (sampling_cases, tree_cases, layer_cases) for case in make(shape) if not args.op or case.op.startswith(tuple(args.op))]
        counts, calls = {}, {}
        for case in cases:
            for who, call in (("ours", case.ours), ("torch", case.torch)):
                if call is not None:
                    counts[who, case.op] = calls_per_millisecond(call)
                    calls[who, case.op] = repeat(call, counts[who, case.op])
        seconds = median_seconds(calls, args.rounds)
        for case in cases:
            ours, baseline = (seconds[who, case.op] / counts[who, case.op] if (who, case.op) in calls else None for who in ("ours", "torch"))
            rows.append({"shape": name, "op": case.op} | measures(ours, case.num_bytes, case.flops, ceilings, baseline))
    if args.json:
        print_json({"threads": torch.get_num_threads(), **ceilings._asdict(), "rows": rows})
        return
    print(header(ceilings))
    for name, shape in SHAPES.items():
        print(f"\n{name}: {shape.nodes} nodes, top_k {shape.top_k}, vocabulary {shape.vocab}, draft vocabulary {shape.draft_vocab}; warm; medians of {args.rounds} runs that take turns")
        print(f"{'op':<26}{COLUMNS}")
        for row in rows:
            if row["shape"] == name:
                print(f"{row['op']:<26}{columns(row)}")


def calls_per_millisecond(call: Callable[[], object]) -> int:
    call()
    started = time.perf_counter()
    call()
    return max(1, int(1e-3 / (time.perf_counter() - started)))


def sampling_cases(s: Shape) -> list[Case]:
    logits = 3 * torch.randn(s.nodes, s.vocab)
    seeds, positions = torch.arange(s.nodes), torch.arange(s.nodes) + 100

    def ours(temperature: float, top_k: int = 0, top_p: float = 1.0):
        parameters = (torch.full((s.nodes,), temperature), torch.full((s.nodes,), top_k, dtype=torch.int32), torch.full((s.nodes,), top_p), torch.zeros(s.nodes))
        return lambda: sample(logits, *parameters, seeds, positions)

    def draw():
        return torch.multinomial(torch.softmax(logits / 0.8, -1), 1)

    def draw_top_k():
        values, ids = torch.topk(logits / 0.8, 50)
        return ids.gather(1, torch.multinomial(torch.softmax(values, -1), 1))

    def draw_top_p():
        values, ids = torch.sort(logits / 0.8, descending=True)
        probs = torch.softmax(values, -1)
        probs[probs.cumsum(-1) - probs >= 0.9] = 0.0
        return ids.gather(1, torch.multinomial(probs, 1))

    size = logits.nbytes
    return [
        Case("sample greedy", ours(0.0), lambda: logits.argmax(-1), size, 0),
        Case("sample temperature", ours(0.8), draw, size, 0),
        Case("sample top_k 50", ours(0.8, top_k=50), draw_top_k, size, 0),
        Case("sample top_p 0.9", ours(0.8, top_p=0.9), draw_top_p, size, 0),
    ]


def tree_cases(s: Shape) -> list[Case]:
    k, frontier = s.top_k, s.top_k
    pool_size = k + (s.max_depth - 1) * k * k
    pool = DraftPool(torch.randint(s.vocab, (1, pool_size)), torch.zeros(1, pool_size), torch.full((1, pool_size), -1, dtype=torch.int32))
    # Scores fall along every path, as `expand` writes them; the first top_k candidates of a level are the next frontier.
    for i in range(pool_size):
        level = 0 if i < k else 1 + (i - k) // (k * k)
        before = 0 if level < 2 else k + (level - 2) * k * k
        parent = -1 if level == 0 else before + (i - k) % (k * k) // k
        pool.parents[0, i] = parent
        pool.scores[0, i] = (0.0 if parent < 0 else float(pool.scores[0, parent])) - float(torch.rand(()) + 0.01)
    logits, features = torch.randn(1, frontier, s.draft_vocab), torch.randn(1, frontier, s.hidden)
    scores, index = torch.zeros(1, frontier), torch.arange(frontier, dtype=torch.int32)[None]
    words = ((s.max_depth - 1) * k + 63) // 64
    mask = torch.zeros(1, frontier, words, dtype=torch.int64)
    scratch = DraftPool(*(tensor.clone() for tensor in pool))

    def expand_torch():
        values, ids = torch.log_softmax(logits, -1).topk(k)
        best, chosen = (values + scores[:, :, None]).flatten(1).topk(k)
        return ids, best, features.gather(1, (chosen // k)[:, :, None].expand(-1, -1, s.hidden))

    head = logits_topk(logits, k)

    def expand_topk_torch():
        best, chosen = (head.keys[:, :, 0].float() + scores[:, :, None]).flatten(1).topk(k)
        return best, features.gather(1, (chosen // k)[:, :, None].expand(-1, -1, s.hidden))

    def logits_topk_torch():
        return logits.topk(k), logits.amax(-1), logits.logsumexp(-1)

    root, seq_lens = torch.tensor([5]), torch.tensor([PREFIX], dtype=torch.int32)
    tree = rerank(pool, root, seq_lens, s.nodes)
    # The target draws the first child everywhere: the longest walk.
    sampled = torch.full((1, s.nodes), -2)
    for node in range(s.nodes - 1, 0, -1):
        sampled[0, tree.parent[0, node]] = tree.tokens[0, node]
    active = torch.ones(1, dtype=torch.bool)
    stops, ring = torch.full((1, 4), -1), torch.zeros(1, 65, dtype=torch.int64)  # no stop token, so that every call walks the whole path
    pages = -(-(PREFIX + s.nodes) // PAGE_SIZE)
    cache = torch.randn(s.layers, 2, pages, PAGE_SIZE, s.kv_heads, s.head_dim)
    page_table = torch.randperm(pages, dtype=torch.int32)[None]
    accepted = torch.tensor([[0] + [min(2 * i, s.nodes - ACCEPTED + i - 1) for i in range(1, ACCEPTED + 1)]], dtype=torch.int32)
    count = torch.tensor([ACCEPTED], dtype=torch.int32)
    rows = cache.view(s.layers, 2, pages * PAGE_SIZE, s.kv_heads, s.head_dim)
    logical = torch.tensor([int(page_table[0, i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE for i in range(PREFIX, PREFIX + s.nodes)])
    source, destination = logical[accepted[0].long()], logical[: ACCEPTED + 1]

    def compact_torch():
        rows[:, :, destination] = rows[:, :, source]

    moved = 2 * ACCEPTED * rows[:, :, 0].nbytes
    return [
        Case("expand", lambda: expand(logits, scores, index, features, mask, scratch, k, k, first_row=k, next_size=k), expand_torch, logits.nbytes, 0),
        Case("expand_topk", lambda: expand_topk(head, scores, index, features, mask, scratch, k, k, first_row=k, next_size=k), expand_topk_torch, head.keys.nbytes + 2 * k * features[0, 0].nbytes, 0),
        Case("logits_topk", lambda: logits_topk(logits, k), logits_topk_torch, logits.nbytes, 0),
        Case("rerank", lambda: rerank(pool, root, seq_lens, s.nodes), lambda: pool.scores.topk(s.nodes - 1).indices.sort(), 16 * pool_size, 0),
        Case("accept", lambda: accept(tree.tokens, tree.parent, sampled, active, s.max_depth), None, 20 * s.nodes, 0),
        Case("accept with stops and ring", lambda: accept(tree.tokens, tree.parent, sampled, active, s.max_depth, stop_token_ids=stops, output_ring=ring), None, 20 * s.nodes, 0),
        Case("compact", lambda: compact(cache, page_table, seq_lens, accepted, count), compact_torch, moved, 0),
    ]


def head_topk(logits: torch.Tensor, top_k: int) -> HeadTopK:
    """What the head keeps of logits [1, F, V], as one tile."""
    values, ids = logits.topk(top_k)
    bits = (values + 0.0).view(torch.int32)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (0xFFFFFFFF - ids)
    greatest = values[..., :1]
    return HeadTopK(keys[:, :, None].contiguous(), greatest.contiguous(), (logits - greatest).exp().sum(-1, keepdim=True))


def layer_cases(s: Shape) -> list[Case]:
    x, residual, weight = torch.randn(s.nodes, s.hidden), torch.zeros(s.nodes, s.hidden), torch.ones(s.hidden)
    out = torch.empty_like(x)
    gate_up, inner = torch.randn(s.nodes, 2 * s.inner), torch.empty(s.nodes, s.inner)
    q, k, v = (torch.randn(1, s.nodes, heads, s.head_dim) for heads in (s.q_heads, s.kv_heads, s.kv_heads))
    pages = -(-(PREFIX + s.nodes) // PAGE_SIZE)
    cache = torch.zeros(2, pages, PAGE_SIZE, s.kv_heads, s.head_dim)
    page_table = torch.randperm(pages, dtype=torch.int32)[None]
    seq_lens = torch.tensor([PREFIX], dtype=torch.int32)
    position_ids = torch.arange(PREFIX, PREFIX + s.nodes)[None]
    angles = torch.rand(PREFIX + s.nodes, s.head_dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    rows = cache.view(2, pages * PAGE_SIZE, s.kv_heads, s.head_dim)
    slots = torch.tensor([int(page_table[0, i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE for i in range(PREFIX, PREFIX + s.nodes)])
    half = s.head_dim // 2

    def rotate(x):
        cos, sin = table[position_ids][:, :, None].split(half, -1)
        return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)

    def rope_torch():
        q.copy_(rotate(q))
        rows[0, slots], rows[1, slots] = rotate(k)[0], v[0]

    def norm_torch():
        residual.add_(x)
        return functional.rms_norm(residual, (s.hidden,), weight, 1e-5)

    return [
        Case("rms_norm with residual", lambda: rms_norm(x, weight, 1e-5, residual, out=out), norm_torch, 4 * x.nbytes, 4 * x.numel()),
        Case("silu_mul", lambda: silu_mul(gate_up, out=inner), lambda: functional.silu(gate_up[:, : s.inner]) * gate_up[:, s.inner :], gate_up.nbytes + inner.nbytes, 0),
        Case("rope_store_kv", lambda: rope_store_kv(q, k, v, position_ids, table, cache, page_table, seq_lens), rope_torch, 2 * (q.nbytes + k.nbytes + v.nbytes), 3 * (q.numel() + k.numel())),
    ]


if __name__ == "__main__":
    main()
