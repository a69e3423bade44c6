"""Everything a step reads and writes, allocated once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from eagle_engine.sampling_params import SamplingParams
from eagle_engine.tree_shape import TreeShape
from eagle_kernels import DraftPool

OUTPUT_RING = 4  # steps whose tokens the output ring holds; the host reads them at most one step late
MAX_STOP_TOKENS = 8
GAIN_UNITS = 1 << 20


@dataclass
class DecodeState:
    """S slots; the running sequences are the first `batch` of them, so that every view is contiguous. A slot without a sequence is a dummy: inactive, one row long, all its pages the last one.

    A step starts with the target's rows committed up to seq_lens, and with the pairs that the drafter has not seen yet: `num_pending` features of the rows just
    committed, each with the token that follows it. The last pending token is the root. Steps of plain decoding in between leave older ones behind, `num_missed`, which the drafter catches up on before it
    drafts again; its own committed rows are seq_lens - num_pending - num_missed.

    Buffers are as large as the largest of the trees that the engine may grow; `max_depth` is the greatest depth of any.
    """

    target_cache: Tensor  # [layers, 2, pages, page_size, kv_heads, head_dim]
    draft_cache: Tensor | None  # [1, 2, pages, page_size, draft kv_heads, draft head_dim]
    page_table: Tensor  # [S, max_pages] int32
    seq_lens: Tensor  # [S] int32, committed rows of the target
    root_tokens: Tensor  # [S] int64
    num_pending: Tensor  # [S] int64, 1 .. max_depth + 1
    pending_tokens: Tensor  # [S, max_depth + 1] int64; the first num_pending are also the tokens that the last step emitted
    pending_features: Tensor  # [S, max_depth + 1, fused_size] activations: features of the target, or its captured states (EAGLE-3), which the drafter fuses when it takes them
    num_missed: Tensor  # [S] int64, 0 .. M
    missed_tokens: Tensor  # [S, M] int64; M = 0 where every step drafts
    missed_features: Tensor  # [S, M, fused_size] activations
    outputs: Tensor  # [S * (C + 1 + G)] int64: all that the host reads, output_ring and gains one after the other
    output_ring: Tensor  # [S, C + 1] int64: token number n that the sequence emitted at column n % C, the number of all of them in the last column; C = OUTPUT_RING * (max_depth + 1)
    gains: Tensor  # [S, G] int64, of an adaptive tree: drafts that the last step would have had accepted by the drafter's own confidence, for each shape with drafts, in units of 2^-20; -1: not known
    stop_token_ids: Tensor  # [S, MAX_STOP_TOKENS] int64, -1 padded
    active: Tensor  # [S] bool
    temperature: Tensor  # [S, N] fp32; sampling parameters are held once per node, as `sample` takes them
    top_k: Tensor  # [S, N] int32
    top_p: Tensor  # [S, N] fp32
    min_p: Tensor  # [S, N] fp32
    seeds: Tensor  # [S, N] int64
    pool_tokens: Tensor  # [S, P] int64
    pool_scores: Tensor  # [S, P] fp32
    pool_parents: Tensor  # [S, P] int32
    root_scores: Tensor  # [S, 1] fp32, zeros: the root's score
    root_pool_index: Tensor  # [S, 1] int32, -1: the root is not in the pool
    root_mask: Tensor  # [S, 1, draft mask words] int64, zeros: the root's pair is a committed row of the drafter
    pending_offsets: Tensor  # [max_depth + 1] int64: 0, 1, ...

    @classmethod
    def allocate(
        cls,
        slots: int,
        max_pages: int,
        fused_size: int,
        shapes: TreeShape | Sequence[TreeShape],
        target_cache: Tensor,
        draft_cache: Tensor | None,
        activation_dtype: torch.dtype = torch.float32,
        max_missed: int = 0,
    ) -> DecodeState:
        """shapes: every tree that a step may grow; max_missed: M, pairs that the drafter may be behind."""
        shapes = (shapes,) if isinstance(shapes, TreeShape) else shapes
        num_gains = sum(bool(shape.levels) for shape in shapes) if len(shapes) > 1 else 0
        width, nodes, pool, mask_words = (max(values) for values in zip(*((shape.max_depth + 1, shape.num_nodes, shape.pool_size, shape.draft_mask_words) for shape in shapes)))
        int32, int64, fp32 = torch.int32, torch.int64, torch.float32
        ring_size = OUTPUT_RING * width + 1
        with target_cache.device:
            outputs = torch.zeros(slots * (ring_size + num_gains), dtype=int64)
            state = cls(
                target_cache=target_cache,
                draft_cache=draft_cache,
                page_table=torch.zeros(slots, max_pages, dtype=int32),
                seq_lens=torch.zeros(slots, dtype=int32),
                root_tokens=torch.zeros(slots, dtype=int64),
                num_pending=torch.ones(slots, dtype=int64),
                pending_tokens=torch.zeros(slots, width, dtype=int64),
                pending_features=torch.zeros(slots, width, fused_size, dtype=activation_dtype),
                num_missed=torch.zeros(slots, dtype=int64),
                missed_tokens=torch.zeros(slots, max_missed, dtype=int64),
                missed_features=torch.zeros(slots, max_missed, fused_size, dtype=activation_dtype),
                active=torch.zeros(slots, dtype=torch.bool),
                temperature=torch.zeros(slots, nodes, dtype=fp32),
                top_k=torch.zeros(slots, nodes, dtype=int32),
                top_p=torch.ones(slots, nodes, dtype=fp32),
                min_p=torch.zeros(slots, nodes, dtype=fp32),
                seeds=torch.zeros(slots, nodes, dtype=int64),
                pool_tokens=torch.zeros(slots, pool, dtype=int64),
                pool_scores=torch.zeros(slots, pool, dtype=fp32),
                pool_parents=torch.zeros(slots, pool, dtype=int32),
                outputs=outputs,
                output_ring=outputs[: slots * ring_size].view(slots, ring_size),
                gains=outputs[slots * ring_size :].view(slots, num_gains),
                stop_token_ids=torch.full((slots, MAX_STOP_TOKENS), -1, dtype=int64),
                root_scores=torch.zeros(slots, 1, dtype=fp32),
                root_pool_index=torch.full((slots, 1), -1, dtype=int32),
                root_mask=torch.zeros(slots, 1, mask_words, dtype=int64),
                pending_offsets=torch.arange(width),
            )
        for slot in range(slots):
            state.clear(slot)
        return state

    def set_sampling(self, slot: int, params: SamplingParams, seed: int) -> None:
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seeds[slot] = seed

    def clear(self, slot: int) -> None:
        """Make a dummy of the slot: a step may run over it, and what it writes goes to the last page."""
        self.page_table[slot] = self.target_cache.shape[2] - 1
        self.seq_lens[slot] = 1
        self.num_pending[slot] = 1
        self.num_missed[slot] = 0
        self.root_tokens[slot] = 0
        self.pending_tokens[slot] = 0
        self.pending_features[slot] = 0
        self.active[slot] = False
        self.temperature[slot] = 0

    def set_stop_tokens(self, slot: int, token_ids: Iterable[int]) -> None:
        """Tokens that end the answer on the device. The host looks at every token anyway, so those past MAX_STOP_TOKENS only cost a step that is thrown away."""
        some = sorted(token_ids)[:MAX_STOP_TOKENS]
        self.stop_token_ids[slot] = torch.tensor(some + [-1] * (MAX_STOP_TOKENS - len(some)), device=self.stop_token_ids.device)

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another; the cache stays where it is, since the page table moves along."""
        for name in self._slot_fields():
            tensor = getattr(self, name)
            tensor[destination] = tensor[source]

    @property
    def max_depth(self) -> int:
        return self.pending_tokens.shape[1] - 1

    def pool(self, batch: int, size: int | None = None) -> DraftPool:
        """Pool [batch, size] of the current step, contiguous; default: of the largest tree."""
        size = self.pool_tokens.shape[1] if size is None else size
        return DraftPool(*(_first(tensor, batch, size) for tensor in (self.pool_tokens, self.pool_scores, self.pool_parents)))

    def root_mask_words(self, batch: int, words: int) -> Tensor:
        """root_mask as [batch, 1, words], contiguous."""
        return _first(self.root_mask, batch, words)[:, None]

    def sampling(self, batch: int, nodes: int | None = None) -> dict[str, Tensor]:
        """Sampling parameters of batch * nodes rows; default: of the largest tree."""
        return {name: getattr(self, name)[:batch, :nodes].contiguous().view(-1) for name in ("temperature", "top_k", "top_p", "min_p", "seeds")}

    def read_outputs(self, outputs: Tensor, batch: int, measured_gains: bool = True) -> tuple[list[list[int]], list[list[float]]]:
        """Of `outputs`, or a copy of it on the host: the output rings of the first slots, and their gains in drafts (below 0: not known); no gains where there are none, or the step has not measured them."""
        size = self.output_ring.numel()
        rings = outputs[:size].view(self.output_ring.shape)[:batch].tolist()
        if not measured_gains or self.gains.shape[1] == 0:
            return rings, [[]] * batch
        return rings, (outputs[size:].view(self.gains.shape)[:batch].double() / GAIN_UNITS).tolist()

    def slot_sampling(self, slot: int) -> dict[str, Tensor]:
        """Sampling parameters of one row of one slot."""
        return {name: getattr(self, name)[slot, :1] for name in ("temperature", "top_k", "top_p", "min_p", "seeds")}

    @classmethod
    def _slot_fields(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name not in ("target_cache", "draft_cache", "pending_offsets", "outputs")]


def _first(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows * columns numbers of a buffer as a contiguous matrix."""
    return tensor.view(-1)[: rows * columns].view(rows, columns)
