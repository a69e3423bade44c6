"""One step of EAGLE-2 on a random target of a real shape, with a drafter that costs what a real one does and is right as often as asked: plain step, speculative step, every phase, floors.

The target's head is a permutation of its embedding and its layers add little, so that its greedy text is known however kernels round, and the cost is that of any weights. The whole step is
timed as the replay of one captured graph, each phase as the replay of a graph of its own (CUDA events; Python is in none of them); what the phases do not explain is the row "gaps". On the
CPU there are no graphs: wall time, Python included.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import fields

import torch
from oracle import OracleDrafter, hit_positions, overwrite
from random_models import random_drafter, random_eagle3, random_target
from roofline import DRAFTERS, default_draft_vocab, floor_seconds, plain_step, speculative_step
from shapes import MODELS, TINY, Device, ModelShape
from timing import Ceilings, captured, event_seconds, header, measure_ceilings, median_seconds, parse_args, print_json, repeat, wall_seconds

from eagle_engine.config import EagleConfig
from eagle_engine.graphs import forward_tree
from eagle_engine.kv_cache import make_kv_cache
from eagle_engine.state import DecodeState
from eagle_engine.step import Models, PhaseTimer, extend, run_step
from eagle_engine.target import TargetModel
from eagle_engine.tree_shape import PLAIN, TreeShape, on_device, tree_shape
from eagle_kernels import Frontier, accept, advance, compact, expand_topk, rerank, sample

STEPS = 16  # of a timed run; the state is put back before each
REPLAYS = 100  # over which memory must not be allocated
PHASE_CALLS = 8  # in the graph of a phase, so that launching the graph weighs little
SHAPES = MODELS | {"tiny": TINY}
PAGE_SIZE = 16

# Phase -> the part of the floor that it is.
FLOOR_PARTS = {
    "draft-extend": ("draft-extend layer", "draft-extend attention"), "draft levels": ("draft level layer", "draft level attention"), "draft heads": ("draft head",), "expand": ("expand",),
    "rerank": ("rerank",), "verify": ("target layers", "target attention", "target head", "capture"), "sample": ("sample",), "accept": ("accept",), "compact": ("compact",), "advance": ("advance",),
}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b", help="shape of target and drafter (default: %(default)s)")
    parser.add_argument("--num-nodes", type=int, default=60, metavar="N", help="nodes of the tree, the root included (default: %(default)s)")
    parser.add_argument("--max-depth", type=int, default=6, metavar="N", help="greatest depth of a node (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help="nodes of a draft level (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="committed rows at the start (default: %(default)s)")
    parser.add_argument("--acceptance-length", type=float, default=4.0, metavar="X", help="tokens per step (default: %(default)s)")
    parser.add_argument("--draft-vocab", type=int, metavar="N", help="rows of the draft head (default: the whole vocabulary; EAGLE-3: 32000)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="eagle-1", help="eagle-1 stands for EAGLE-2 too, whose weights are the same (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: %(default)s); floors are those of one")
    parser.add_argument("--deterministic", action="store_true", help="CUDA: row-invariant kernels")


def make_state(target: TargetModel, fused_size: int, shape: TreeShape, caches: tuple[torch.Tensor, torch.Tensor], args: argparse.Namespace, tokens: torch.Tensor) -> DecodeState:
    """Slots as after a prefill of `context` rows; the roots are `tokens` [B]; fused_size: of what the drafter takes."""
    cache, draft_cache = caches
    pages = (cache.shape[2] - 1) // args.batch
    state = DecodeState.allocate(args.batch, pages, fused_size, shape, cache, draft_cache if shape.levels else None, target.activation_dtype)
    state.page_table.copy_(torch.randperm(args.batch * pages).view(args.batch, pages))
    state.seq_lens.fill_(args.context)
    state.root_tokens.copy_(tokens)
    state.pending_tokens.copy_(tokens[:, None].expand_as(state.pending_tokens))
    state.pending_features.normal_()
    state.active.fill_(True)
    return state


class Restart:
    """Puts a state back to what it was."""

    def __init__(self, state: DecodeState) -> None:
        self.state = state
        self.saved = {f.name: getattr(state, f.name).clone() for f in fields(state) if "cache" not in f.name}

    def __call__(self) -> None:
        for name, tensor in self.saved.items():
            getattr(self.state, name).copy_(tensor)


def timed_steps(models: Models, state: DecodeState, args: argparse.Namespace) -> dict:
    """Seconds and tokens of a step: medians over runs of STEPS steps."""
    batch, restart = args.batch, Restart(state)
    step: Callable[[], object] = lambda: run_step(models, state, batch, PhaseTimer())  # noqa: E731
    allocated = None
    if args.device == "cuda":
        step = captured(step)
    restart()
    before = state.output_ring[:, -1].clone()

    def run() -> None:
        for _ in range(STEPS):
            step()

    run()
    emitted = (state.output_ring[:, -1] - before).float().mean().item() / STEPS
    if args.device == "cuda":
        name = "allocated_bytes.all.allocated"
        start = torch.cuda.memory_stats()[name]
        for i in range(REPLAYS):
            if i % STEPS == 0:
                restart()
            step()
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()[name] - start
    samples = []
    for _ in range(args.rounds):
        restart()
        samples.append((event_seconds if args.device == "cuda" else wall_seconds)(run) / STEPS)
    restart()
    return {"seconds": statistics.median(samples), "acceptance_length": emitted, "bytes_allocated": allocated}


def phases(models: Models, state: DecodeState, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Each phase on what an eager step left before it: the calls of eagle_engine.step, over and over. What a phase would advance is a copy."""
    batch, oracle, shape = args.batch, models.drafter, models.shape
    drafter, pool, cache, lens, table = oracle.drafter, state.pool(batch), state.draft_cache[0], state.seq_lens[:batch], state.page_table[:batch]
    features = extend(oracle, state, batch)
    frontier = Frontier(state.root_tokens[:batch, None], state.root_scores[:batch], state.root_pool_index[:batch], features, state.root_mask[:batch])
    heads, expands, levels, oracles = [], [], [], []
    for depth, level in enumerate(shape.levels):
        head = oracle.head_topk(features, shape.top_k)
        heads.append(lambda features=features: drafter.head_topk(features, shape.top_k))
        oracles.append(lambda head=head, place=(oracle.tokens, oracle.positions, oracle.ahead): overwrite(head, *place, oracle.next_token, oracle.hits))

        positions = torch.empty(batch, level.next_size, dtype=torch.int64, device=features.device)

        def expand(frontier=frontier, features=features, head=head, level=level, depth=depth, positions=positions) -> Frontier:
            return expand_topk(
                head, frontier.scores, frontier.pool_index, features, frontier.mask, pool, level.pool_offset, shape.top_k, first_row=level.first_row, next_size=level.next_size,
                draft_to_target=drafter.draft_to_target, choices=level.choices, seq_lens=lens, depth=depth, position_ids=positions,
            )  # fmt: skip

        expands.append(expand)
        frontier = expand()
        if level.next_size > 0:
            def forward(frontier=frontier, positions=positions, level=level) -> torch.Tensor:
                return drafter.forward(frontier.tokens, frontier.features, positions, cache, lens, table, frontier.mask, level.first_row)

            levels.append(forward)
            features = oracle.forward(frontier.tokens, frontier.features, positions, cache, lens, table, frontier.mask, level.first_row)
    grow = lambda: rerank(pool, state.root_tokens[:batch], lens, shape.num_nodes)  # noqa: E731
    tree = grow()
    look = lambda: forward_tree(models.target, models.captured_layers, state, batch, tree.tokens, tree.position_ids, tree.packed_ancestor_mask)  # noqa: E731
    target_features, logits = look()
    params = state.sampling(batch)
    seeds, places = params.pop("seeds"), (tree.position_ids + 1).view(-1)
    draw = lambda: sample(logits, **params, seeds=seeds, positions=places)  # noqa: E731
    sampled = draw().view(batch, -1)
    active, ring = state.active.clone(), state.output_ring.clone()
    walk = lambda: accept(tree.tokens, tree.parent, sampled, active, shape.max_depth, stop_token_ids=state.stop_token_ids, output_ring=ring)  # noqa: E731
    accepted = walk()
    rest = [tensor.clone() for tensor in (state.seq_lens, state.root_tokens, state.num_pending, state.pending_tokens, state.pending_features)]

    def every(calls: list[Callable[[], object]]) -> Callable[[], None]:
        def run() -> None:
            for call in calls:
                call()

        return run

    return {
        "draft-extend": lambda: extend(drafter, state, batch), "draft levels": every(levels), "draft heads": every(heads), "oracle": every(oracles), "expand": every(expands), "rerank": grow,
        "verify": look, "sample": draw, "accept": walk, "compact": lambda: compact(state.target_cache, table, lens, accepted.accepted_nodes, accepted.num_accepted_drafts),
        "advance": lambda: advance(tree.tokens, target_features, accepted, state.active, *rest),
    }  # fmt: skip


@torch.inference_mode()
def measure(args: argparse.Namespace, ceilings: Ceilings) -> dict:
    model: ModelShape = SHAPES[args.model]
    device = args.device
    draft_vocab = default_draft_vocab(args, model)
    shape = on_device(tree_shape(EagleConfig(tree="dynamic", top_k=args.top_k, max_depth=args.max_depth, num_nodes=args.num_nodes)), torch.device(device))
    max_positions = args.context + (STEPS + 2) * (args.max_depth + 1) + args.num_nodes
    # The text stays inside the draft vocabulary, where every token is followed by another.
    order = torch.randperm(draft_vocab)
    next_token = torch.arange(model.vocab)
    next_token[order] = order.roll(-1)
    target = random_target(model, max_positions, device=device, deterministic=args.deterministic, next_token=next_token.to(device), update=0.05)
    drafter = (random_eagle3 if args.drafter == "eagle-3" else random_drafter)(target, model, draft_vocab if draft_vocab != model.vocab else None)
    pages = -(-max_positions // PAGE_SIZE)
    caches = tuple(make_kv_cache(layers, args.batch * pages, PAGE_SIZE, model.kv_heads, model.head_dim, target.activation_dtype, device) for layers in (model.layers, 1))
    for cache in caches:
        cache.normal_()
    roots = order[: args.batch].to(device)
    state, plain_state = make_state(target, drafter.config.fused_size, shape, caches, args, roots), make_state(target, target.config.hidden_size, PLAIN, caches, args, roots)
    hits = hit_positions(args.context, max_positions + 2, args.acceptance_length, args.max_depth).to(torch.int8).to(device)
    models = Models(target, OracleDrafter(drafter, next_token[:draft_vocab].to(device), hits, state), shape, False, "hf")

    plain = timed_steps(Models(target, None, PLAIN, False, "hf"), plain_state, args)
    speculative = timed_steps(models, state, args)
    calls = phases(models, state, args)
    if device == "cuda":
        calls = {name: captured(repeat([call], PHASE_CALLS)) for name, call in calls.items()}
        seconds = {name: value / PHASE_CALLS for name, value in median_seconds(calls, args.rounds, event_seconds).items()}
    else:
        seconds = median_seconds(calls, args.rounds)
    return summary(args, ceilings, model, draft_vocab, plain, speculative, seconds) | {"target_bytes": target.num_bytes, "drafter_bytes": drafter.num_bytes}


def summary(args: argparse.Namespace, ceilings: Ceilings, model: ModelShape, draft_vocab: int, plain: dict, speculative: dict, seconds: dict[str, float]) -> dict:
    """All figures, from the times."""
    rates = Device(ceilings.copy_bandwidth if args.device == "cuda" else ceilings.read_bandwidth, ceilings.fma_rate)
    parts = {part.name: part.seconds(rates) for part in speculative_step(model, args.num_nodes, args.max_depth, args.top_k, args.context, draft_vocab, args.drafter)}
    floors = {name: sum(parts.get(part, 0.0) for part in names) for name, names in FLOOR_PARTS.items()}
    plain_floor = floor_seconds(plain_step(model, args.context), rates)
    whole = speculative["seconds"]
    rows = [{"phase": name, "microseconds": value * 1e6, "share": value / whole, "floor_microseconds": floors[name] * 1e6 if name in floors else None} for name, value in seconds.items()]
    gaps = whole - sum(seconds.values())
    rows.append({"phase": "gaps", "microseconds": gaps * 1e6, "share": gaps / whole, "floor_microseconds": None})
    drafting = ("draft levels", "draft heads", "expand")
    # One level: a forward, a head, an expansion. There is a forward less than heads.
    forwards, heads = max(args.max_depth - 1, 1), args.max_depth
    level, level_floor = (values["draft levels"] / forwards + (values["draft heads"] + values["expand"]) / heads for values in (seconds, floors))
    allocated = [run["bytes_allocated"] for run in (plain, speculative) if run["bytes_allocated"] is not None]
    return {
        "model": args.model, "drafter": args.drafter, "device": args.device, "deterministic": args.deterministic, "batch": args.batch, "context": args.context, "num_nodes": args.num_nodes, "max_depth": args.max_depth,
        "top_k": args.top_k, "draft_vocab": draft_vocab, **ceilings._asdict(),
        "plain": {"milliseconds": plain["seconds"] * 1e3, "floor_milliseconds": plain_floor * 1e3, "over_floor": plain["seconds"] / plain_floor},
        "speculative": {"milliseconds": whole * 1e3, "floor_milliseconds": sum(floors.values()) * 1e3, "over_floor": whole / sum(floors.values())},
        "step_over_plain": whole / plain["seconds"],
        "draft_level_microseconds": level * 1e6, "draft_level_over_floor": level / level_floor, "drafting_share": sum(seconds[name] for name in drafting) / whole,
        "acceptance_length": speculative["acceptance_length"], "asked_acceptance_length": args.acceptance_length,
        "tokens_per_second": args.batch * speculative["acceptance_length"] / whole, "plain_tokens_per_second": args.batch * plain["acceptance_length"] / plain["seconds"],
        "bytes_allocated_by_replays": sum(allocated) if allocated else None, "phases": rows,
    }  # fmt: skip


def show(result: dict, ceilings: Ceilings) -> None:
    how = "replays of captured graphs, CUDA events" if result["device"] == "cuda" else "no graphs, wall time with Python's"
    print(header(ceilings, result["device"]))
    print(f"{result['model']}, random weights, {result['target_bytes'] / 1e9:.2f} GB and an {result['drafter']} drafter of {result['drafter_bytes'] / 1e9:.2f} GB; batch {result['batch']}, context {result['context']}, "
          f"{result['num_nodes']} nodes, max_depth {result['max_depth']}, top_k {result['top_k']}, draft vocabulary {result['draft_vocab']}{', deterministic' if result['deterministic'] else ''}; {how}")  # fmt: skip
    print(f"\n{'phase':<16}{'us':>10}{'of step':>9}{'floor us':>10}{'reached':>9}")
    for row in result["phases"]:
        floor = row["floor_microseconds"]
        print(f"{row['phase']:<16}{row['microseconds']:>10.1f}{row['share']:>9.1%}" + ("" if floor is None else f"{floor:>10.1f}{floor / row['microseconds']:>9.0%}"))
    for name in ("speculative", "plain"):
        row = result[name]
        print(f"{name + ' step':<16}{row['milliseconds'] * 1e3:>10.1f}{'':>9}{row['floor_milliseconds'] * 1e3:>10.1f}{1 / row['over_floor']:>9.0%}")
    print(f"\nspeculative over plain step {result['step_over_plain']:.3f}; draft level {result['draft_level_microseconds']:.1f} us, {result['draft_level_over_floor']:.2f} of its floor")
    print(f"acceptance length {result['acceptance_length']:.2f} (asked for {result['asked_acceptance_length']:g}): {result['tokens_per_second']:.0f} tokens/s, plain {result['plain_tokens_per_second']:.0f}")
    if result["bytes_allocated_by_replays"] is not None:
        print(f"bytes allocated by {REPLAYS} replays of either step: {result['bytes_allocated_by_replays']}")


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], rounds=5, add=options)
    ceilings = measure_ceilings(args.device)
    result = measure(args, ceilings)
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1))
    if args.json:
        print_json(result)
    else:
        show(result, ceilings)


if __name__ == "__main__":
    main()
