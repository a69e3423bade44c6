"""From a prompt to a slot that decodes: the prompt is committed in pieces, between the steps of others, then its first token is drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eagle_engine.logits_processing import LogitsProcessor
from eagle_engine.state import DecodeState
from eagle_engine.step import Models
from eagle_kernels import sample


class PrefilledRow(NamedTuple):
    """What the target made of the last row of a piece.

    feature  [1, H] activations
    states   [fused_size] activations, which the drafter takes
    """

    feature: Tensor
    states: Tensor


def prefill_piece(models: Models, state: DecodeState, page_table: Tensor, token_ids: Tensor, start: int, stop: int, processor: LogitsProcessor | None = None) -> PrefilledRow:
    """Commit rows start..stop - 1 of a sequence, those before it being committed already.

    page_table  [1, max_pages] int32, with pages for all of them
    token_ids   [n] int64, the whole sequence, on the device

    The drafter's pair of row i is committed with it where token i + 1 is known: that of the last token of all waits for the first token of the answer.
    """
    target, drafter, device = models.target, models.drafter, token_ids.device
    position_ids = torch.arange(start, stop, device=device)[None]
    seq_lens = torch.full((1,), start, dtype=torch.int32, device=device)
    features, states = target.forward_with_states(models.captured_layers, token_ids[None, start:stop], position_ids, state.target_cache, seq_lens, page_table)
    if processor is not None:
        processor.record_prompt(target.logits, features[0], start)
    following = token_ids[None, start + 1 : stop + 1].clone()  # aligned, as kernels are compiled for it
    pairs = following.shape[1]
    if state.draft_cache is not None and pairs > 0:
        drafter.store(following, drafter.fuse(states[:, :pairs]), position_ids[:, :pairs], state.draft_cache[0], seq_lens, page_table)
    return PrefilledRow(features[:, -1], states[0, -1])


def draw_first(models: Models, state: DecodeState, slot: int, row: PrefilledRow, length: int, processor: LogitsProcessor | None = None) -> Tensor:
    """The first token of an answer [1] int64 after a prompt of `length` tokens, by the sampling parameters of the slot."""
    logits = models.target.logits(row.feature)
    params = {name: values.clone() for name, values in state.slot_sampling(slot).items()}
    if processor is not None:
        params |= processor.sample_arguments([-1], [-1])
    first = sample(logits, **params, positions=torch.full((1,), length, device=logits.device), order=models.filter_order)
    if processor is not None:
        processor.record(logits, first.tolist())
    return first


def begin(state: DecodeState, slot: int, row: PrefilledRow, root_token: Tensor, length: int, num_emitted: int) -> None:
    """Let a slot decode behind `length` committed rows.

    root_token   [1] int64, the last emitted token: the root, and the only pending token
    num_emitted  1: it is new, and the first of the output ring; 0: the host has it already (a request that goes on after it was preempted)
    """
    state.seq_lens[slot] = length
    state.root_tokens[slot] = root_token[0]
    state.output_ring[slot, 0] = root_token[0]
    state.output_ring[slot, -1] = num_emitted
    state.num_pending[slot] = 1
    state.num_missed[slot] = 0
    state.pending_tokens[slot, 0] = root_token[0]
    state.pending_features[slot, 0] = row.states
    state.active[slot] = True
