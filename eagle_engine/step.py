"""One step: draft, expand, rerank, verify, accept, compact. Every phase is a function from some fields of the state to others; no host decision inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle_engine.drafter import Drafter
from eagle_engine.graphs import VerifyGraphs, forward_tree
from eagle_engine.logits_processing import LogitsProcessor, record_logprobs, sample_tree
from eagle_engine.observation import ObservedTree, observed_trees
from eagle_engine.state import DecodeState
from eagle_engine.target import TargetModel
from eagle_engine.tree_gains import measure_gains
from eagle_engine.tree_shape import TreeShape
from eagle_kernels import Accepted, DraftPool, Frontier, Tree, accept, accept_rejection, advance, compact, draw_children, expand_topk, filter_probs, rerank

PHASES = ("prefill", "draft", "verify", "sample", "compact", "graph")  # "graph": a captured step, all of it


class PhaseTimer:
    """Seconds spent per phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


class Models(NamedTuple):
    """What a step runs.

    drafter       None: every step is plain decoding; without levels in the shape this one is, and what the drafter misses is kept for it
    rejection     acceptance rule: speculative sampling on drawn drafts instead of sample-exact
    filter_order  "hf" or "vllm"
    graphs        recorded forwards; None: eager
    sizes         shapes with drafts that later steps may have, whose gains a step measures; (): nobody asks
    max_pending   pairs that the step before can have left to the drafter, of any sequence; None: as many as the largest tree leaves
    """

    target: TargetModel
    drafter: Drafter | None
    shape: TreeShape
    rejection: bool
    filter_order: str
    graphs: VerifyGraphs | None = None
    sizes: tuple[TreeShape, ...] = ()
    max_pending: int | None = None

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the drafter takes."""
        return () if self.drafter is None else self.drafter.captured_layers


def run_step(
    models: Models,
    state: DecodeState,
    batch: int,
    timer: PhaseTimer,
    observe: Callable[[list[ObservedTree]], None] | None = None,
    processors: Sequence[LogitsProcessor | None] = (),
) -> Accepted:
    """Advance the first `batch` slots by one draft-and-verify cycle.

    Afterwards output_ring and pending_tokens hold the emitted tokens of each sequence and num_pending their number; a token -1 says that the target's logits at that place are not
    usable (NaN, or nothing above -inf). A sequence that emits one of its stop tokens becomes inactive. `observe` is given the step's trees at its end, on the host; `processors`, one for each slot or
    none at all, change the logits of their slots: eager steps only, both.
    """
    timer.start()
    if models.shape.levels:
        pool, draft_probs = draft(models, state, batch)
        if models.sizes:
            measure_gains(pool, models.shape, models.sizes, state.gains[:batch])
    else:
        pool, draft_probs = state.pool(batch, models.shape.pool_size), None
    tree = rerank(pool, state.root_tokens[:batch], state.seq_lens[:batch], models.shape.num_nodes, choices=models.shape.node_choices)
    timer.lap("draft")
    states, logits = verify(models, state, batch, tree)
    timer.lap("verify")
    accepted, sampled = choose(models, state, batch, tree, logits, draft_probs, processors)
    timer.lap("sample")
    commit(models, state, batch, tree, accepted, states)
    timer.lap("compact")
    if observe is not None:
        observe(observed_trees(models.shape, pool, tree, sampled, accepted))
    return accepted


def draft(models: Models, state: DecodeState, batch: int) -> tuple[DraftPool, list[Tensor]]:
    """Feed the drafter what the last step committed, then grow the pool level by level."""
    drafter, shape = models.drafter, models.shape
    pool = state.pool(batch, shape.pool_size)
    cache, page_table, seq_lens = state.draft_cache[0], state.page_table[:batch], state.seq_lens[:batch]
    features = extend(drafter, state, batch, models.max_pending)
    frontier = Frontier(state.root_tokens[:batch, None], state.root_scores[:batch], state.root_pool_index[:batch], features, state.root_mask_words(batch, shape.draft_mask_words))
    draft_probs = []
    for depth, level in enumerate(shape.levels):
        if models.rejection:
            frontier, probs = draw_level(models, state, batch, drafter.logits(features), frontier, features, pool, depth)
            position_ids = (seq_lens[:, None].long() + depth).expand(-1, level.next_size).contiguous()
            draft_probs.append(probs)
        else:
            position_ids = torch.empty(batch, level.next_size, dtype=torch.int64, device=features.device)
            frontier = expand_topk(
                drafter.head_topk(features, shape.top_k), frontier.scores, frontier.pool_index, features, frontier.mask, pool, level.pool_offset, shape.top_k, first_row=level.first_row, next_size=level.next_size,
                draft_to_target=drafter.draft_to_target, choices=level.choices, seq_lens=seq_lens, depth=depth, position_ids=position_ids,
            )  # fmt: skip
        if level.next_size > 0:
            features = drafter.forward(frontier.tokens, frontier.features, position_ids, cache, seq_lens, page_table, frontier.mask, level.first_row)
    return pool, draft_probs


def extend(drafter: Drafter, state: DecodeState, batch: int, max_pending: int | None = None) -> Tensor:
    """Append the pending pairs to the drafter's committed rows; the feature predicted after the last of them, [B, 1, H]. Nothing may have been missed (`catch_up`).

    max_pending rows are run of every sequence, so that the shape is fixed; rows past num_pending write above seq_lens, where the draft levels write next. None: all columns of the pending pairs.
    """
    num_pending, offsets = state.num_pending[:batch], state.pending_offsets[:max_pending]
    draft_lens = torch.sub(state.seq_lens[:batch], num_pending, out=torch.empty_like(state.seq_lens[:batch]))
    position_ids = draft_lens[:, None] + offsets
    tokens, states = (pairs[:batch, :max_pending].contiguous() for pairs in (state.pending_tokens, state.pending_features))
    features = drafter.forward(tokens, drafter.fuse(states), position_ids, state.draft_cache[0], draft_lens, state.page_table[:batch])
    last = (num_pending - 1)[:, None, None].expand(-1, 1, features.shape[-1])
    return features.gather(1, last)


def catch_up(models: Models, state: DecodeState, batch: int, rows: int) -> None:
    """Append the missed pairs, at most `rows` of any sequence, to the drafter's committed rows.

    As many rows are run of every sequence; those past num_missed write above the drafter's committed rows, where the pending pairs and the draft levels write next, or to the last page.
    """
    drafter, num_missed = models.drafter, state.num_missed[:batch]
    draft_lens = (state.seq_lens[:batch] - state.num_pending[:batch] - num_missed).int()
    position_ids = draft_lens[:, None] + torch.arange(rows, device=draft_lens.device)
    features = drafter.fuse(state.missed_features[:batch, :rows].contiguous())
    drafter.store(state.missed_tokens[:batch, :rows].contiguous(), features, position_ids, state.draft_cache[0], draft_lens, state.page_table[:batch])
    num_missed.zero_()


def draw_level(models: Models, state: DecodeState, batch: int, logits: Tensor, frontier: Frontier, features: Tensor, pool: DraftPool, depth: int) -> tuple[Frontier, Tensor]:
    """Rejection sampling: like `expand`, with children drawn without replacement from the filtered draft distribution, which is returned as [B, F, draft vocabulary]."""
    level, top_k, drafter = models.shape.levels[depth], models.shape.top_k, models.drafter
    rows, vocab = batch * level.frontier, logits.shape[-1]
    params = {name: getattr(state, name)[:batch, 0].repeat_interleave(level.frontier) for name in ("temperature", "top_k", "top_p", "min_p", "seeds")}
    seeds = params.pop("seeds")
    # The children of a node at this depth stand at position seq_len + depth + 1.
    positions = (state.seq_lens[:batch].long() + depth + 1).repeat_interleave(level.frontier)
    flat = logits.reshape(rows, vocab)
    probs = filter_probs(flat, **params, order=models.filter_order).view(batch, level.frontier, vocab)
    children = draw_children(flat, **params, seeds=seeds, positions=positions, count=top_k, lanes=level.frontier, order=models.filter_order)
    drawn = children.view(batch, level.frontier, top_k)
    log_probs = probs.gather(2, drawn.clamp(min=0)).log().masked_fill(drawn < 0, float("-inf"))
    if drafter.draft_to_target is not None:
        children = torch.where(children < 0, children, drafter.draft_to_target[children.clamp(min=0)])
    place = slice(level.pool_offset, level.pool_offset + level.frontier * top_k)
    pool.tokens[:, place] = children.view(batch, -1)
    pool.scores[:, place] = (frontier.scores[:, :, None] + log_probs).view(batch, -1)
    pool.parents[:, place] = frontier.pool_index.repeat_interleave(top_k, dim=1)
    chosen = level.choices.long()
    parent = chosen // top_k
    mask = frontier.mask[:, parent]
    for j in range(level.next_size):
        row = level.first_row + j
        mask[:, j, row // 64] |= 1 << row % 64 if row % 64 < 63 else -(1 << 63)
    pool_index = (level.pool_offset + level.choices)[None].expand(batch, -1).contiguous()
    return Frontier(pool.tokens[:, level.pool_offset + chosen], pool.scores[:, level.pool_offset + chosen], pool_index, features[:, parent], mask), probs


def verify(models: Models, state: DecodeState, batch: int, tree: Tree) -> tuple[Tensor, Tensor]:
    """The target's forward over the tree: states for the drafter [B, N, fused_size] and logits [B * N, V]."""
    if models.graphs is not None:
        return models.graphs.replay(batch, tree)
    return forward_tree(models.target, models.captured_layers, state, batch, tree.tokens, tree.position_ids, tree.packed_ancestor_mask)


def choose(
    models: Models, state: DecodeState, batch: int, tree: Tree, logits: Tensor, draft_probs: list[Tensor] | None, processors: Sequence[LogitsProcessor | None] = ()
) -> tuple[Accepted, Tensor | None]:
    """Draw the target's tokens and walk down the tree along them; the tokens [B, N] int64 with it, None with rejection sampling, which does not draw one per node."""
    shape, params = models.shape, state.sampling(batch, models.shape.num_nodes)
    if models.rejection and shape.levels:
        params.pop("seeds")
        target_probs = filter_probs(logits, **params, order=models.filter_order).view(batch, shape.num_nodes, -1)
        all_draft_probs = torch.zeros_like(target_probs)
        for nodes, probs in zip(shape.frontier_nodes, draft_probs):
            for i, node in enumerate(nodes):
                if models.drafter.draft_to_target is None:
                    all_draft_probs[:, node] = probs[:, i]
                else:
                    all_draft_probs[:, node, models.drafter.draft_to_target] = probs[:, i]
        positions = state.seq_lens[:batch].long() + 1
        accepted = accept_rejection(tree.tokens, tree.parent, target_probs, all_draft_probs, state.seeds[:batch, 0].contiguous(), positions, state.active[:batch], state.max_depth)
        append_output(state, batch, tree, accepted)
        return accepted, None
    sampled = sample_tree(logits, tree, params, models.filter_order, processors)
    accepted = accept(tree.tokens, tree.parent, sampled, state.active[:batch], state.max_depth, stop_token_ids=state.stop_token_ids[:batch], output_ring=state.output_ring[:batch])
    record_logprobs(logits, tree, accepted, processors)
    return accepted, sampled


def append_output(state: DecodeState, batch: int, tree: Tree, accepted: Accepted) -> None:
    """What `accept` does with the output ring, for rejection sampling: the accepted drafts, then the bonus token."""
    ring, size, offsets = state.output_ring[:batch], state.output_ring.shape[1] - 1, state.pending_offsets
    nodes = accepted.accepted_nodes.clamp(min=0).long()
    tokens = torch.cat((tree.tokens.gather(1, nodes[:, 1:]), accepted.bonus_token[:, None]), dim=1)
    last = accepted.num_accepted_drafts[:, None].long()
    tokens = torch.where(offsets == last, accepted.bonus_token[:, None], tokens)
    columns = (ring[:, -1:] + offsets) % size
    kept = (offsets <= last) & state.active[:batch, None]
    ring.scatter_(1, columns, torch.where(kept, tokens, ring.gather(1, columns)))
    ring[:, -1] += torch.where(state.active[:batch], accepted.num_accepted_drafts + 1, 0)


def commit(models: Models, state: DecodeState, batch: int, tree: Tree, accepted: Accepted, states: Tensor) -> None:
    """Keep the accepted rows, hand their states and tokens to the next draft, advance seq_lens."""
    # A step without drafting puts new pending pairs in the place of those that the drafter has not seen.
    misses = not models.shape.levels and state.draft_cache is not None
    missed = (state.num_missed[:batch], state.missed_tokens[:batch], state.missed_features[:batch]) if misses else ()
    if models.shape.levels:
        compact(state.target_cache, state.page_table[:batch], state.seq_lens[:batch], accepted.accepted_nodes, accepted.num_accepted_drafts)
    advance(
        tree.tokens, states, accepted, state.active[:batch], state.seq_lens[:batch], state.root_tokens[:batch], state.num_pending[:batch], state.pending_tokens[:batch],
        state.pending_features[:batch], *missed,
    )  # fmt: skip
