"""Log-probabilities of tokens under the target's own distribution. Every number is that of plain decoding, bit for bit: it is a function of one row of logits."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from eagle_engine.outputs import Logprob, TokenLogprobs
from eagle_engine.tokenizer import Tokenizer
from eagle_kernels import logits_topk

PIECE = 64  # rows whose logits are held at a time for a prompt


def token_logprobs(logits: Tensor, token_ids: list[int], count: int, tokenizer: Tokenizer | None) -> list[TokenLogprobs]:
    """Per row its token and the `count` most likely ones.

    logits     [R, V] fp32
    token_ids  R tokens

    log-probability = logit - (max + log sum exp(logit - max)), the sum as `logits_topk` has it, the rest in double precision on the host, so that no row depends on its neighbours.
    """
    if not token_ids:
        return []
    top_k = min(max(count, 1), logits.shape[1])
    head = logits_topk(logits, top_k)
    # A key holds the logit and the id, and greater keys come first; tiles past the vocabulary hold the smallest key.
    keys = head.keys.flatten(1).sort(dim=1, descending=True).values[:, :top_k].tolist()
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logits.gather(1, ids)
    before = (logits == own) & (torch.arange(logits.shape[1], device=logits.device) < ids)
    ranks = ((logits > own).sum(dim=1) + before.sum(dim=1) + 1).tolist()
    found = []
    for token, logit, rank, row, maxima, sums in zip(token_ids, own[:, 0].tolist(), ranks, keys, head.max.tolist(), head.sum_exp.tolist()):
        greatest = max(maxima)
        total = math.fsum(sum_exp * math.exp(maximum - greatest) for maximum, sum_exp in zip(maxima, sums) if sum_exp > 0) if math.isfinite(greatest) else 1.0
        place = {token: Logprob(_logprob(logit, greatest, total), rank, _text(token, tokenizer))}
        for i, key in enumerate(row[:count]):
            top, value = _from_key(key)
            place.setdefault(top, Logprob(_logprob(value, greatest, total), i + 1, _text(top, tokenizer)))
        found.append(place)
    return found


def prompt_logprobs(logits: Callable[[Tensor], Tensor], features: Tensor, following: list[int], count: int, tokenizer: Tokenizer | None) -> list[TokenLogprobs]:
    """Of the tokens that follow rows of a prompt.

    logits     features [r, H] -> logits [r, V]
    features   [R, H], or more rows than `following` has tokens
    following  the token after each row
    """
    found = []
    for start in range(0, len(following), PIECE):
        tokens = following[start : start + PIECE]
        found += token_logprobs(logits(features[start : start + len(tokens)]), tokens, count, tokenizer)
    return found


def _logprob(logit: float, greatest: float, total: float) -> float:
    if math.isinf(greatest):
        return 0.0 if logit == greatest else -math.inf
    return logit - (greatest + math.log(total))


def _from_key(key: int) -> tuple[int, float]:
    """The id and the logit in a key of HeadTopK."""
    ordered = key >> 32
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return 0xFFFFFFFF - (key & 0xFFFFFFFF), struct.unpack("<f", struct.pack("<i", bits))[0]


def _text(token: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
