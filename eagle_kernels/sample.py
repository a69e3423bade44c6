"""Sample-exact drawing of tokens, and the filtered distribution."""

import torch
from torch import Tensor

from eagle_kernels._extension import OPS

ORDERS = ("hf", "vllm")


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    order: str = "hf",
    logit_bias: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    output_counts: Tensor | None = None,
    return_log_probs: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One token per row, a pure function of (logits, parameters, seed, position).

    logits              [R, V] fp32, last dimension contiguous
    temperature         [R] fp32; 0 = greedy: arg-max, smaller id wins ties
    top_k               [R] int32; 0 = off
    top_p               [R] fp32; 1 = off
    min_p               [R] fp32; 0 = off
    seeds, positions    [R] int64; position = absolute position of the drawn token
    order               "hf": top_k, top_p, min_p; "vllm": min_p, top_k, top_p
    logit_bias          [R, V] fp32 or None, added first
    repetition_penalty  [R] fp32 or None: tokens of prompt or output, x > 0 ? x / r : x * r
    frequency_penalty   [R] fp32 or None: x -= f * count
    presence_penalty    [R] fp32 or None: x -= p where count > 0
    prompt_mask         [R, V] bool or None; output_counts [R, V] int32 or None
    return_log_probs    also the log-probability of the drawn token under softmax of the unchanged logits, [R] fp32
    returns             [R] int64; -1 for a row with a NaN or without any value above -inf

    z = logits / temperature; the filters keep a leading part of the order (z descending, id ascending), with probability masses exp(z - max z) as integers in units of
    2^-40; top_p keeps a token iff the mass before it is less than top_p of what is still kept; token = arg-max over the kept of z + gumbel(seed, position, id), smaller id
    wins ties. A row whose maximum is +inf gives its smallest id.
    """
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) if return_log_probs else None
    OPS.sample(
        logits, temperature, top_k, top_p, min_p, seeds, positions, _min_p_first(order), logit_bias, repetition_penalty, presence_penalty, frequency_penalty, prompt_mask, output_counts, out,
        log_probs,
    )  # fmt: skip
    return (out, log_probs) if return_log_probs else out


def filter_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, order: str = "hf", out: Tensor | None = None) -> Tensor:
    """The distribution that `sample` draws from.

    Arguments as in `sample`; returns [R, V] fp32, zero outside the kept tokens. Temperature 0: one at the arg-max. Rows that `sample` refuses are all zero.
    """
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    OPS.filter_probs(logits, temperature, top_k, top_p, min_p, _min_p_first(order), out)
    return out


def draw_children(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor, *, count: int, lanes: int = 1, order: str = "hf", out: Tensor | None = None
) -> Tensor:
    """Tokens drawn without replacement from the distribution of `filter_probs`, in the order of drawing (Gumbel top-k: Kool, van Hoof, Welling, 2019).

    count    1 to 64 draws per row
    lanes    row r draws with the noise of stream 1 + 16 * (r % lanes), so that the nodes of a level draw independently
    returns  [R, count] int64, -1 once the kept tokens are used up

    The other arguments are those of `sample`. draws = the `count` best of z + gumbel(seed, position, id, stream) over the kept tokens.
    """
    if out is None:
        out = torch.empty(logits.shape[0], count, dtype=torch.int64, device=logits.device)
    OPS.draw_children(logits, temperature, top_k, top_p, min_p, seeds, positions, lanes, _min_p_first(order), out)
    return out


def _min_p_first(order: str) -> bool:
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
    return order == "vllm"
