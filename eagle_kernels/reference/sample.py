"""References of sample, draw_children and filter_probs, one row at a time."""

import math

import torch

from .fp32_math import fp32_exp
from .gumbel_noise import gumbel_noise

MASS_ONE = 2.0**40


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    order: str = "hf",
    logit_bias: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    output_counts: torch.Tensor | None = None,
    return_log_probs: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One token per row, a pure function of the row, its parameters, its seed and its position.

    logits              [R, V] fp32
    temperature         [R] fp32; 0 = arg-max
    top_k               [R] int32; 0 = off
    top_p, min_p        [R] fp32; 1 and 0 = off
    seeds, positions    [R] int64
    order               "hf": top_k, top_p, min_p; "vllm": min_p, top_k, top_p
    logit_bias          [R, V] fp32
    *_penalty           [R] fp32; repetition counts prompt and output tokens, the others output tokens
    prompt_mask         [R, V] bool, the tokens of the prompt
    output_counts       [R, V] int32, how often each token was emitted
    returns             tokens [R] int64; with return_log_probs also log_probs [R] fp32 under softmax(logits)

    x = logits + bias, penalised;  z = x / temperature
    token = arg-max over the kept ids of z + gumbel(seed, position, id); smaller id wins ties
    -1 for a row with a NaN or without any value above -inf; if max(z) is infinite, the first id that has it
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64) if out is None else out
    log_probs = torch.empty(num_rows, dtype=torch.float32)
    noise = gumbel_noise(seeds, positions, vocab_size)
    for r in range(num_rows):
        x = logits[r]
        if logit_bias is not None:
            x = x + logit_bias[r]
        count = output_counts[r] if output_counts is not None else torch.zeros(vocab_size, dtype=torch.int32)
        if repetition_penalty is not None:
            seen = count > 0
            if prompt_mask is not None:
                seen = seen | prompt_mask[r]
            penalised = torch.where(x > 0, x / repetition_penalty[r], x * repetition_penalty[r])
            x = torch.where(seen, penalised, x)
        if frequency_penalty is not None:
            x = x - frequency_penalty[r] * count.float()
        if presence_penalty is not None:
            x = torch.where(count > 0, x - presence_penalty[r], x)

        tokens[r] = draws(x, temperature[r], int(top_k[r]), float(top_p[r]), float(min_p[r]), order, noise[r])[0]
        log_probs[r] = log_prob(logits[r].tolist(), int(tokens[r]))
    return (tokens, log_probs) if return_log_probs else tokens


def draw_children(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    count: int,
    lanes: int = 1,
    order: str = "hf",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens drawn without replacement from the distribution of `filter_probs`, in the order of drawing.

    lanes    row r draws with the noise of stream 1 + 16 * (r % lanes)
    returns  [R, count] int64, -1 once the kept tokens are used up

    The other arguments are those of `sample`. draws = the `count` best kept ids by (z + gumbel desc, id asc)
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, count, dtype=torch.int64) if out is None else out
    for r in range(num_rows):
        noise = gumbel_noise(seeds[r : r + 1], positions[r : r + 1], vocab_size, stream=1 + 16 * (r % lanes))[0]
        drawn = draws(logits[r], temperature[r], int(top_k[r]), float(top_p[r]), float(min_p[r]), order, noise)
        tokens[r] = torch.tensor((drawn + [-1] * count)[:count])
    return tokens


def filter_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    order: str = "hf",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution that `sample` draws from: the masses of the kept tokens over their sum.

    logits         [R, V] fp32
    temperature    [R] fp32; 0 = all mass on the arg-max
    top_k          [R] int32; 0 = off
    top_p, min_p   [R] fp32; 1 and 0 = off
    returns        [R, V] fp32; zeros for a row that `sample` answers with -1
    """
    probs = torch.empty(logits.shape, dtype=torch.float32) if out is None else out
    probs.zero_()
    for r in range(logits.shape[0]):
        token, z = point_mass_or_z(logits[r], temperature[r])
        if z is not None:
            kept = kept_tokens(z, int(top_k[r]), float(top_p[r]), float(min_p[r]), order)
            mass = masses(z)
            total = sum(mass[i] for i in kept)
            for i in kept:
                probs[r, i] = mass[i] / total
        elif token >= 0:
            probs[r, token] = 1.0
    return probs


def point_mass_or_z(x: torch.Tensor, temperature: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """(the only possible token or -1, None), or (-1, z) where there is something to draw. x [V] fp32."""
    if x.isnan().any() or x.max() == -math.inf:
        return -1, None
    if temperature == 0:
        return first_argmax(x.tolist()), None
    z = x / temperature
    if z.max().isinf():
        return first_argmax(z.tolist()), None
    return -1, z


def draws(
    x: torch.Tensor, temperature: torch.Tensor, top_k: int, top_p: float, min_p: float, order: str, noise: torch.Tensor
) -> list[int]:
    """All tokens of a row in the order in which they are drawn without replacement; [-1] for a row without any. x and noise [V] fp32."""
    token, z = point_mass_or_z(x, temperature)
    if z is None:
        return [token]
    perturbed = (z + noise).tolist()
    kept = [i for i in kept_tokens(z, top_k, top_p, min_p, order) if perturbed[i] > -math.inf]
    return sorted(kept, key=lambda i: (-perturbed[i], i))


def kept_tokens(z: torch.Tensor, top_k: int, top_p: float, min_p: float, order: str) -> list[int]:
    """The ids that pass the filters: a leading part of the order (z desc, id asc)."""
    value, exponential, mass = z.tolist(), fp32_exp(z - z.max()).tolist(), masses(z)

    def keep_top_k(ids: list[int]) -> list[int]:
        return ids[:top_k] if top_k > 0 else ids

    def keep_top_p(ids: list[int]) -> list[int]:
        if top_p >= 1:
            return ids
        limit = top_p * float(sum(mass[i] for i in ids))
        kept, before = [], 0
        for i in ids:
            if not kept or float(before) < limit:
                kept.append(i)
            before += mass[i]
        return kept

    def keep_min_p(ids: list[int]) -> list[int]:
        return [i for i in ids if exponential[i] >= min_p] if min_p > 0 else ids

    filters = {"hf": (keep_top_k, keep_top_p, keep_min_p), "vllm": (keep_min_p, keep_top_k, keep_top_p)}
    ids = sorted(range(len(value)), key=lambda i: (-value[i], i))
    for keep in filters[order]:
        ids = keep(ids)
    return ids


def masses(z: torch.Tensor) -> list[int]:
    """exp(z - max z) in units of 2^-40, rounded down: sums of integers are the same in any order. z [V] fp32."""
    return (fp32_exp(z - z.max()).double() * MASS_ONE).long().tolist()


def first_argmax(values: list[float]) -> int:
    """The smallest index of the greatest value."""
    return values.index(max(values))


def log_prob(logits: list[float], token: int) -> float:
    """log softmax(logits)[token]; -inf where there is no token."""
    if token < 0:
        return -math.inf
    largest = max(logits)
    if math.isinf(largest):
        return 0.0 if logits[token] == largest else -math.inf
    return logits[token] - largest - math.log(math.fsum(math.exp(value - largest) for value in logits))
