"""A drafter that costs what a real one costs and knows the target's next token, except at chosen positions: for a step with a chosen acceptance length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle_engine.drafter import Drafter
from eagle_engine.state import DecodeState
from eagle_kernels import HeadTopK

BIG = 1000.0  # the logit of what the oracle says; far above those of the random head


def ordered_bits(value: float) -> int:
    """Upper half of a key of HeadTopK, for a value of 0 or more."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def hit_positions(first_root: int, count: int, acceptance_length: float, max_depth: int) -> Tensor:
    """[count] bool: whether the oracle is right about the token at each position. From a root at first_root on it is wrong once every acceptance_length tokens, on average and with gaps as even as
    can be; a step ends at such a position, so each emits one gap."""
    if not 1.0 <= acceptance_length <= max_depth + 1:
        raise ValueError(f"acceptance_length: expected 1 to max_depth + 1 = {max_depth + 1}, got {acceptance_length}")
    hits = torch.ones(count, dtype=torch.bool)
    step = 1
    # The rounded multiples of the length differ by its floor or its ceiling.
    while (miss := first_root + int(step * acceptance_length + 0.5)) < count:
        hits[miss] = False
        step += 1
    return hits


@triton.jit
def _overwrite_kernel(
    tokens_ptr,  # [rows] int64
    positions_ptr,  # [rows] int32 or int64
    next_token_ptr,  # [vocab_size] int64
    hits_ptr,  # [num_positions] int8
    keys_ptr,  # [rows, tiles, top_k] int64
    max_ptr,  # [rows, tiles] fp32
    sum_exp_ptr,  # [rows, tiles] fp32
    vocab_size,
    num_positions,
    tiles,
    top_k,
    ahead,
    BITS: tl.constexpr,
    VALUE: tl.constexpr,
):
    """The first key of the first tile of one row becomes what the oracle says. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), vocab_size - 1)
    position = tl.minimum(tl.load(positions_ptr + row).to(tl.int64) + ahead, num_positions - 1)
    right = tl.load(next_token_ptr + token)
    says = tl.where(tl.load(hits_ptr + position) != 0, right, (right + 1) % vocab_size)
    high = tl.full((), BITS, tl.int64) << 32
    tl.store(keys_ptr + row * tiles * top_k, high | (0xFFFFFFFF - says))
    tl.store(max_ptr + row * tiles, VALUE)
    tl.store(sum_exp_ptr + row * tiles, 1.0)


def overwrite(head: HeadTopK, tokens: Tensor, positions: Tensor, ahead: int, next_token: Tensor, hits: Tensor) -> None:
    """Make next_token[token] (a wrong token where the oracle must be wrong) the best draft of every row, by far; in one launch on CUDA.

    head        HeadTopK [B, F, tiles, top_k]; modified
    tokens      [B, F] int64, contiguous
    positions   [B, F] int32 or int64, contiguous; the token that is drafted stands `ahead` of them
    next_token  [draft vocabulary] int64
    hits        [positions] int8
    """
    rows, tiles, top_k = tokens.numel(), *head.keys.shape[-2:]
    if tokens.is_cuda:
        _overwrite_kernel[(rows,)](
            tokens, positions, next_token, hits, *head, len(next_token), len(hits), tiles, top_k, ahead, BITS=ordered_bits(BIG), VALUE=BIG, num_warps=1, enable_fp_fusion=False
        )  # fmt: skip
        return
    right = next_token[tokens.clamp(0, len(next_token) - 1)]
    says = torch.where(hits[(positions.long() + ahead).clamp(max=len(hits) - 1)] != 0, right, (right + 1) % len(next_token))
    head.keys[..., 0, 0] = (ordered_bits(BIG) << 32) | (0xFFFFFFFF - says)
    head.max[..., 0] = BIG
    head.sum_exp[..., 0] = 1.0


class OracleDrafter:
    """Runs the forward and the head of a real drafter, then says what it knows instead.

    next_token  [draft vocabulary] int64, on the device
    hits        [positions] int8, on the device
    state       of the step, which holds the roots
    """

    def __init__(self, drafter: Drafter, next_token: Tensor, hits: Tensor, state: DecodeState) -> None:
        self.drafter, self.next_token, self.hits, self.state = drafter, next_token, hits, state
        self.config, self.vocab_size, self.draft_to_target = drafter.config, drafter.vocab_size, drafter.draft_to_target
        self.captured_layers, self.fuse = drafter.captured_layers, drafter.fuse
        self.tokens = self.positions = self.ahead = None  # of the frontier whose features came last: [B, F], [B, F], and where the next token stands after these positions

    def forward(self, token_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Tensor, seq_lens: Tensor, page_table: Tensor, packed_ancestor_mask: Tensor | None = None, row_offset: int = 0) -> Tensor:
        if packed_ancestor_mask is None:  # the draft-extend, of whose rows the root's is used
            batch = token_ids.shape[0]
            self.tokens, self.positions, self.ahead = self.state.root_tokens[:batch, None], self.state.seq_lens[:batch, None], 1
        else:  # a pair sits at the position of its feature, one before its token
            self.tokens, self.positions, self.ahead = token_ids, position_ids, 2
        return self.drafter.forward(token_ids, features, position_ids, cache, seq_lens, page_table, packed_ancestor_mask, row_offset)

    def head_topk(self, features: Tensor, top_k: int) -> HeadTopK:
        head = self.drafter.head_topk(features, top_k)
        overwrite(head, self.tokens, self.positions, self.ahead, self.next_token, self.hits)
        return head
