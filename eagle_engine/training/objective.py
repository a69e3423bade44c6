"""What is minimised: the published objectives of EAGLE-1/2 and EAGLE-3, over an unrolled drafter."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_engine.training.model import TrainableDrafter, UnrolledAttention


_ROW_STEP = 64  # rows whose logits are taken are filled up to a multiple of this


class Batch(NamedTuple):
    """Rows of L tokens, each with several conversations one after the other.

    tokens        [B, L] int64
    position_ids  [B, L] int64, from 0 in each conversation
    documents     [B, L] int64, number of the conversation within the row; -1: padding
    supervised    [B, L] bool, tokens of an assistant
    states        [B, L, fused_size], what the target hands over
    features      [B, L, Ht], the target's features, after its final norm
    best          [B, L] int64, the token that the target finds likeliest after each
    """

    tokens: Tensor
    position_ids: Tensor
    documents: Tensor
    supervised: Tensor
    states: Tensor
    features: Tensor
    best: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


class Sums(NamedTuple):
    """Sums over the supervised rows of each unrolled step, [steps] each, for metrics.

    rows      pairs whose next token is an assistant's
    reached   those of them for which every earlier draft was the target's choice
    accepted  those of `reached` whose draft is the target's choice too
    """

    rows: Tensor
    reached: Tensor
    accepted: Tensor
    token_loss: Tensor
    feature_loss: Tensor


class UnrolledObjective(nn.Module):
    """Loss of a drafter that is fed with its own features for `steps` levels.

    Row t of step i is fed with its own feature of step i - 1 (step 0: the target's) and the token t + 1 + i, and predicts the target's distribution and feature at token t + 1 + i.

        token loss    cross-entropy against the target's distribution over the draft vocabulary, renormalised; rows whose likeliest token is outside of it count as zero
        feature loss  EAGLE-1/2: smooth L1, mean over the channels
        loss          sum over i of decay^i * (token_weight * token loss + feature_weight * feature loss), each a sum over supervised rows divided by B * L, as published

    EAGLE-1/2 as published: steps 1, token_weight 0.1, feature_weight 1. EAGLE-3: steps 7, decay 0.8, token_weight 1, feature_weight 0. Dividing by the number of all positions, not by that of the
    supervised ones, gives every token the same weight however a batch is cut into parts.

    embedding    [V, Ht], the target's, frozen; a drafter that is narrower has one of its own, which is trained
    target_head  [Vd, Ht], rows of the target's head
    draft_vocab  [Vd] int64, the target's ids of the draft vocabulary, ascending; None: the whole vocabulary
    row_length   L of the loss, when batches are cut to their longest row; None: that of the batch
    """

    def __init__(
        self, drafter: TrainableDrafter, embedding: Tensor, target_head: Tensor, draft_vocab: Tensor | None, *, steps: int, decay: float, token_weight: float, feature_weight: float,
        noise: float = 0.0, row_length: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.drafter = drafter
        self.steps, self.decay, self.token_weight, self.feature_weight, self.noise, self.row_length = steps, decay, token_weight, feature_weight, noise, row_length
        vocab_size = embedding.shape[0]
        draft_ids = torch.arange(vocab_size)
        if draft_vocab is not None:
            draft_ids = torch.full((vocab_size,), -1).index_copy(0, draft_vocab, torch.arange(len(draft_vocab)))
        # Not parameters, and not part of a checkpoint: they belong to the target.
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_head", target_head, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: Batch, noise_seed: int = 0) -> tuple[Tensor, Sums]:
        """The loss, a scalar, and the sums behind it. noise_seed: of the uniform noise in [-noise, noise] on the target's states, which only training adds."""
        # Held-out figures are computed in float32, whatever the precision of training: in bfloat16 many logits tie, and a tie counts as right.
        with nullcontext() if self.training else torch.autocast(batch.tokens.device.type, enabled=False):
            return self._forward(batch, noise_seed)

    def _forward(self, batch: Batch, noise_seed: int) -> tuple[Tensor, Sums]:
        drafter, (rows, length) = self.drafter, batch.tokens.shape
        drafter.prepare()
        target_head = self.target_head if self.training else self.target_head.float()
        states = batch.states.float()
        if self.noise and self.training:
            generator = torch.Generator(states.device).manual_seed(noise_seed)
            states = states + (torch.rand(states.shape, generator=generator, device=states.device) * 2 - 1) * self.noise
        features = drafter.fuse(states)
        same = batch.documents[:, :, None] == batch.documents[:, None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        attend = UnrolledAttention(drafter.config, same & causal, batch.position_ids, self.steps)

        # Places whose next token is an assistant's: there the target's distribution is learned.
        taught = _shifted(batch.supervised, 1) & (_shifted(batch.documents, 1, -1) == batch.documents) & (batch.documents >= 0)
        number = (taught.flatten().cumsum(0) - 1).view(rows, length)
        with torch.no_grad():
            target_probs = F.linear(batch.features[taught].to(target_head.dtype), target_head).float().softmax(-1)
            best = self.draft_ids[batch.best[taught]]

        reached = _shifted(batch.supervised, 1)  # a draft starts after a token of the assistant
        loss = torch.zeros((), device=states.device)
        sums: list[Tensor] = []
        for step in range(self.steps):
            features = drafter.layer(drafter.embed(_shifted(batch.tokens, 1 + step), self.embedding), features, attend)
            fed = _shifted(taught, 1 + step) & (_shifted(batch.documents, 1 + step, -1) == batch.documents)
            row, place = fed.nonzero(as_tuple=True)
            count = len(row)
            if count == 0:
                loss = loss + 0.0 * features.sum()
                sums.append(torch.zeros(len(Sums._fields), dtype=torch.float64, device=loss.device))
                continue
            # Filled up with rows that count for nothing: the CPU's matrix library keeps a plan, and memory, for every number of rows that it meets.
            row, place = (torch.cat((index, index[:1].expand(-count % _ROW_STEP))) for index in (row, place))
            predicted, at = features[row, place], number[row, place + 1 + step]
            chosen = best[at]
            chosen[count:] = -1
            per_row, right = SoftCrossEntropy.apply(drafter.logits(predicted, target_head), target_probs, at, chosen)
            token_loss = per_row.sum()
            feature_loss = token_loss.new_zeros(())
            if self.feature_weight:
                wanted = batch.features[row[:count], place[:count] + 1 + step].float()
                feature_loss = F.smooth_l1_loss(predicted[:count].float(), wanted, reduction="none").mean(-1).sum()
            loss = loss + self.decay**step * (self.token_weight * token_loss + self.feature_weight * feature_loss) / (rows * (self.row_length or length))
            with torch.no_grad():
                row, place = row[:count], place[:count]
                before = reached[row, place]
                right = before & right[:count]
                reached = torch.zeros_like(reached).index_put((row, place), right)
                sums.append(torch.stack([torch.tensor(count, device=loss.device), before.sum(), right.sum(), token_loss, feature_loss]).double())
        return loss, Sums(*torch.stack(sums, dim=1))


class SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of n rows of logits against target_probs[at], with the gradient made in the same pass over the logits.

    logits [n, Vd]; target_probs [m, Vd] fp32; at [n] int64; chosen [n] int64, the target's choice, below 0 where it is outside of the draft vocabulary: such a row counts as zero
    -> loss of each row [n] fp32, and whether the choice has the greatest logit [n] bool
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target_probs: Tensor, at: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        counted = (chosen >= 0)[:, None]
        losses, right, gradient = [], [], torch.empty_like(logits)
        for rows in torch.arange(len(logits), device=logits.device).split(_rows_at_a_time(logits)):
            x, probs, count = logits[rows].float(), target_probs[at[rows]], counted[rows]
            peak = x.amax(-1, keepdim=True)
            right.append((x.gather(-1, chosen[rows, None].clamp(min=0)) == peak) & count)
            inner = (probs * x).sum(-1, keepdim=True)
            e = x.sub_(peak).exp_()
            total = e.sum(-1, keepdim=True)
            losses.append((total.log() + peak - inner) * count)
            gradient[rows] = e.div_(total).sub_(probs).mul_(count).to(gradient.dtype)
        if not losses:
            return logits.new_zeros(0, dtype=torch.float32), logits.new_zeros(0, dtype=torch.bool)
        ctx.save_for_backward(gradient)
        right = torch.cat(right)[:, 0]
        ctx.mark_non_differentiable(right)
        return torch.cat(losses)[:, 0], right

    @staticmethod
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None].to(gradient.dtype), None, None, None


def _rows_at_a_time(logits: Tensor) -> int:
    """CPU: so many rows that they stay in a core's cache over the passes; twice as fast at 640 rows of 8192. CUDA: so many that each of the four temporaries has a gigabyte at most."""
    return max(1, (1 << (28 if logits.is_cuda else 17)) // logits.shape[-1])


def _shifted(x: Tensor, places: int, fill: int = 0) -> Tensor:
    """x [B, L] moved to the left: column t holds what stood at t + places."""
    return F.pad(x[:, places:], (0, min(places, x.shape[1])), value=fill)
