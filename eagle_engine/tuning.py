"""Steps over made-up sequences, to measure what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from eagle_engine.cost_profile import SHORT, CostProfile, measure_profile
from eagle_engine.graphs import batch_buckets
from eagle_engine.kv_cache import PagePool
from eagle_engine.state import DecodeState
from eagle_engine.tree_shape import TreeShape


@torch.inference_mode()
def measure_steps(
    state: DecodeState, pages: PagePool, shapes: Sequence[TreeShape], step_rows: int, context_rows: int, step: Callable[[int, int], None], progress: Callable[[str], None]
) -> CostProfile:
    """Profile of an engine in which nothing runs; the state is left as it was, the pages are given back.

    step_rows     rows that a step may write above the committed ones
    context_rows  longest context to measure
    step          step(batch, shape) runs one step over the first slots, and waits for its end
    """
    slots = state.seq_lens.shape[0]
    taken = pages.take(min(pages.num_free, max(pages.pages_for(SHORT + step_rows) * slots, pages.pages_for(context_rows + step_rows))))
    for cache in (state.target_cache, state.draft_cache):
        cache[:, :, taken] = 0  # memory that was never written would be read faster

    def prepare(batch: int, context: int) -> None:
        width = pages.pages_for(context + step_rows)
        for slot in range(batch):
            state.clear(slot)
            own = [taken[(slot * width + i) % len(taken)] for i in range(width)]
            state.page_table[slot, :width] = torch.tensor(own, dtype=torch.int32, device=state.page_table.device)
            state.seq_lens[slot] = context

    try:
        return measure_profile(prepare, step, shapes, batch_buckets(slots), context_rows, progress)
    finally:
        for slot in range(slots):
            state.clear(slot)
        pages.give_back(taken)
