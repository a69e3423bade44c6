"""The kernel behind sample, filter_probs and draw_children on CUDA.

Its decisions hang on fixed fp32 operations, on integers and on single fp64 comparisons, so its tokens are those of eagle_kernels/reference/sample.py exactly: z = x / temperature is an IEEE division,
probability masses exp(z - max z) are integers in units of 2^-40, and ordered(z) is the int32 that ascends with z.
"""

import triton
import triton.language as tl

from eagle_kernels.triton.fp32_math import fp32_exp, fp32_log
from eagle_kernels.triton.noise import gumbel_of, noise_words

TOKENS, PROBS, CHILDREN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MAX_CHILDREN = tl.constexpr(64)
NO_CUT = tl.constexpr(-2147483648)  # below ordered(-inf)
INFINITY = tl.constexpr(float("inf"))
LEAST_KEY = tl.constexpr(-9223372036854775808)
GREATEST_KEY = tl.constexpr(9223372036854775807)


@triton.jit
def ordered_of(z):
    """int32 that ascends with z; both zeros are one."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def mass_of(exponential):
    """exponential in [0, 1] in units of 2^-40, rounded down, int64: its upper 16 and lower 24 bits, each exact in fp32 and int32."""
    scaled = exponential * 65536.0
    high = scaled.to(tl.int32)
    low = ((scaled - high.to(tl.float32)) * 16777216.0).to(tl.int32)
    return (high.to(tl.int64) << 24) + low.to(tl.int64)


@triton.jit
def _load_x(logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, i, inside, ADJUST: tl.constexpr):
    """Logits after bias and penalties; -inf past the end. A penalty that is absent is 1 or 0, which changes nothing."""
    x = tl.load(logits_ptr + i, mask=inside, other=-INFINITY)
    if ADJUST:
        nothing = tl.zeros_like(i)
        x += tl.load(bias_ptr + i, mask=inside & (nothing < has_bias), other=0.0)
        count = tl.load(counts_ptr + i, mask=inside & (nothing < has_counts), other=0)
        in_prompt = tl.load(prompt_ptr + i, mask=inside & (nothing < has_prompt), other=0)
        penalised = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where((count > 0) | (in_prompt != 0), penalised, x)
        x -= frequency * count.to(tl.float32)
        x = tl.where(count > 0, x - presence, x)
        x = tl.where(inside, x, -INFINITY)
    return x


@triton.jit
def _find_cut(
    logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, temperature,
    z_max, least_exp, after, after_id, limit, vocab_size, USE_MASS: tl.constexpr, ADJUST: tl.constexpr, BLOCK: tl.constexpr, NUM_THRESHOLDS: tl.constexpr,
):  # fmt: skip
    """Where the leading part of the order (z descending, id ascending) reaches `limit` (fp64), counted in tokens or in mass. Of the tokens above (after, after_id) with an exponential of least_exp
    or more, those stay that have ordered(z) above the first result, or equal to it and an id up to the second.

    Weights above a threshold fall as the threshold rises: bisection over the integers, NUM_THRESHOLDS of them per pass over the row.
    """
    lane = tl.arange(0, BLOCK)
    j = tl.arange(0, NUM_THRESHOLDS)
    high = ordered_of(z_max).to(tl.int64) + 1  # holds less than `limit`
    if USE_MASS:
        low = ordered_of(z_max - 30.0).to(tl.int64)  # holds all mass
    else:
        low = high * 0 + NO_CUT  # holds all tokens
    above = low * 0  # weight of what is at `high` or above
    while high - low > 1:
        threshold = low + (high - low) * (j + 1) // (NUM_THRESHOLDS + 1)
        if USE_MASS:
            sums = tl.zeros((BLOCK, NUM_THRESHOLDS), tl.int64)
        else:
            sums = tl.zeros((BLOCK, NUM_THRESHOLDS), tl.int32)
        narrow = threshold.to(tl.int32)[None, :]
        for first in range(0, vocab_size, BLOCK):
            i = first + lane
            inside = i < vocab_size
            x = _load_x(logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, i, inside, ADJUST)
            z = tl.div_rn(x, tl.zeros_like(x) + temperature)
            order = ordered_of(z)
            exponential = fp32_exp(z - z_max)
            counted = inside & (exponential >= least_exp) & ((order > after) | ((order == after) & (i <= after_id)))
            if USE_MASS:
                weight = tl.where(counted, mass_of(exponential), 0)
                sums += tl.where(order[:, None] >= narrow, weight[:, None], 0)
            else:
                sums += ((order[:, None] >= narrow) & counted[:, None]).to(tl.int32)
        weights = tl.sum(sums, 0).to(tl.int64)
        enough = weights.to(tl.float64) >= limit
        above = tl.maximum(above, tl.max(tl.where(enough, 0, weights), 0))
        low = tl.maximum(low, tl.max(tl.where(enough, threshold, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, threshold), 0))

    cut = low.to(tl.int32)
    # How many of the tokens at the cut are needed: one at least.
    if USE_MASS:
        bits = cut ^ ((cut >> 31) & 0x7FFFFFFF)
        each = tl.maximum(mass_of(fp32_exp(bits.to(tl.float32, bitcast=True) - z_max)), 1)
        # The quotient is off by at most 32: sums of 2^57 are rounded by 16 when they become fp64.
        needed = tl.maximum(((limit - above.to(tl.float64)) / each.to(tl.float64)).to(tl.int64) - 40, 1)
        while (above + needed * each).to(tl.float64) < limit:
            needed += 1
    else:
        needed = limit.to(tl.int64) - above
    seen = above * 0
    last = tl.full((BLOCK,), -1, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        inside = i < vocab_size
        x = _load_x(logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, i, inside, ADJUST)
        z = tl.div_rn(x, tl.zeros_like(x) + temperature)
        order = ordered_of(z)
        counted = inside & (fp32_exp(z - z_max) >= least_exp) & ((order > after) | ((order == after) & (i <= after_id)))
        at_cut = (counted & (order == cut)).to(tl.int32)
        place = seen + tl.cumsum(at_cut, 0).to(tl.int64)
        last = tl.where((at_cut != 0) & (place <= needed), i, last)
        seen += tl.sum(at_cut, 0).to(tl.int64)
    return cut, tl.max(last, 0)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [rows, vocab_size] fp32, row stride stride_x
    temperature_ptr,  # [rows] fp32
    top_k_ptr,  # [rows] int32
    top_p_ptr,  # [rows] fp32
    min_p_ptr,  # [rows] fp32
    seeds_ptr,  # [rows] int64, not for PROBS
    positions_ptr,  # [rows] int64, not for PROBS
    bias_ptr,  # [rows, vocab_size] fp32, if has_bias
    repetition_ptr,  # [rows] fp32, if has_repetition
    presence_ptr,  # [rows] fp32, if has_presence
    frequency_ptr,  # [rows] fp32, if has_frequency
    prompt_ptr,  # [rows, vocab_size] uint8, if has_prompt
    counts_ptr,  # [rows, vocab_size] int32, if has_counts
    out_ptr,  # TOKENS: [rows] int64; PROBS: [rows, vocab_size] fp32; CHILDREN: [rows, count] int64
    log_probs_ptr,  # [rows] fp32, if has_log_probs
    stride_x,
    vocab_size,
    min_p_first,
    lanes,
    count,
    has_bias,
    has_repetition,
    has_presence,
    has_frequency,
    has_prompt,
    has_counts,
    has_log_probs,
    MODE: tl.constexpr,
    ADJUST: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_THRESHOLDS: tl.constexpr,
):
    """One program per row. Grid (rows). A row without filters is read once; each filter with a cut reads it about a dozen times more, from the cache."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_x
    bias_ptr += row * vocab_size
    prompt_ptr += row * vocab_size
    counts_ptr += row * vocab_size
    repetition = tl.load(repetition_ptr + row, mask=has_repetition != 0, other=1.0)
    presence = tl.load(presence_ptr + row, mask=has_presence != 0, other=0.0)
    frequency = tl.load(frequency_ptr + row, mask=has_frequency != 0, other=0.0)
    given_temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    use_top_k = (top_k > 0) & (top_k < vocab_size)
    use_top_p = top_p < 1.0
    filtered = use_top_k | use_top_p | (min_p > 0.0)
    draws = given_temperature > 0.0
    temperature = tl.where(draws, given_temperature, 1.0)
    lane = tl.arange(0, BLOCK)
    if MODE == PROBS:
        seed = row * 0
        position = row * 0
    else:
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)

    # The maximum and its first id; a row that needs nothing else gets its token here.
    best = tl.full((BLOCK,), -INFINITY, tl.float32)
    best_id = tl.zeros((BLOCK,), tl.int32)
    nans = tl.zeros((BLOCK,), tl.int32)
    score = tl.full((BLOCK,), -INFINITY, tl.float32)
    score_id = tl.zeros((BLOCK,), tl.int32)
    plain = draws & (filtered == 0)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        inside = i < vocab_size
        x = _load_x(logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, i, inside, ADJUST)
        nans = nans | (x != x).to(tl.int32)
        best_id = tl.where(x > best, i, best_id)
        best = tl.where(x > best, x, best)
        if MODE == TOKENS:
            if plain:
                s = tl.div_rn(x, tl.zeros_like(x) + temperature) + gumbel_of(noise_words(seed, position, 0, first, BLOCK))
                score_id = tl.where(s > score, i, score_id)
                score = tl.where(s > score, s, score)
    greatest = tl.max(best, 0)
    token = tl.min(tl.where(best == greatest, best_id, vocab_size), 0)
    z_max = tl.div_rn(greatest, temperature)
    valid = (tl.max(nans, 0) == 0) & (greatest > -INFINITY)
    overflow = valid & draws & ((z_max == INFINITY) | (z_max == -INFINITY))
    random = valid & draws & (z_max < INFINITY) & (z_max > -INFINITY)
    token = tl.where(valid, token, -1)
    if overflow:
        # Other values may overflow as well: the first that does.
        best_id = tl.full((BLOCK,), vocab_size, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            i = first + lane
            inside = i < vocab_size
            x = _load_x(logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, i, inside, ADJUST)
            hit = inside & (tl.div_rn(x, tl.zeros_like(x) + temperature) == z_max)
            best_id = tl.minimum(best_id, tl.where(hit, i, vocab_size))
        token = tl.min(best_id, 0)

    if MODE == TOKENS:
        if random & plain:
            best_score = tl.max(score, 0)
            token = tl.min(tl.where(score == best_score, score_id, vocab_size), 0)

    least_exp = tl.where(min_p_first != 0, min_p, 0.0)  # of the tokens that the cuts count
    k_cut = tl.min(lane, 0) + NO_CUT
    k_id = tl.min(lane, 0)
    p_cut = k_cut
    p_id = k_id
    if random & use_top_k:
        k_cut, k_id = _find_cut(
            logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, temperature,
            z_max, least_exp, k_cut, k_id, top_k.to(tl.float64), vocab_size, False, ADJUST, BLOCK, NUM_THRESHOLDS,
        )  # fmt: skip
    total = row * 0
    if random & (use_top_p | (MODE == PROBS)):
        # Mass of what the earlier filters kept; without top_p it is the sum of the probabilities.
        masses = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, vocab_size, BLOCK):
            i = first + lane
            inside = i < vocab_size
            x = _load_x(logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, i, inside, ADJUST)
            z = tl.div_rn(x, tl.zeros_like(x) + temperature)
            order = ordered_of(z)
            exponential = fp32_exp(z - z_max)
            kept = inside & (exponential >= least_exp) & ((order > k_cut) | ((order == k_cut) & (i <= k_id)))
            masses += tl.where(kept, mass_of(exponential), 0)
        total = tl.sum(masses, 0)
    if random & use_top_p:
        p_cut, p_id = _find_cut(
            logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, temperature,
            z_max, least_exp, k_cut, k_id, top_p.to(tl.float64) * total.to(tl.float64), vocab_size, True, ADJUST, BLOCK, NUM_THRESHOLDS,
        )  # fmt: skip

    if MODE == TOKENS:
        if random & filtered:
            score = tl.full((BLOCK,), -INFINITY, tl.float32)
            score_id = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, vocab_size, BLOCK):
                i = first + lane
                inside = i < vocab_size
                x = _load_x(logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, i, inside, ADJUST)
                z = tl.div_rn(x, tl.zeros_like(x) + temperature)
                order = ordered_of(z)
                kept = inside & (fp32_exp(z - z_max) >= min_p) & ((order > k_cut) | ((order == k_cut) & (i <= k_id))) & ((order > p_cut) | ((order == p_cut) & (i <= p_id)))
                s = tl.where(kept, z + gumbel_of(noise_words(seed, position, 0, first, BLOCK)), -INFINITY)
                score_id = tl.where(s > score, i, score_id)
                score = tl.where(s > score, s, score)
            best_score = tl.max(score, 0)
            token = tl.min(tl.where(score == best_score, score_id, vocab_size), 0)
        tl.store(out_ptr + row, token.to(tl.int64))
        if has_log_probs != 0:
            _write_log_prob(logits_ptr, log_probs_ptr + row, token, vocab_size, BLOCK)
    elif MODE == PROBS:
        out_ptr += row * vocab_size
        if random & filtered:
            masses = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, vocab_size, BLOCK):
                i = first + lane
                inside = i < vocab_size
                z = tl.div_rn(tl.load(logits_ptr + i, mask=inside, other=-INFINITY), tl.zeros((BLOCK,), tl.float32) + temperature)
                order = ordered_of(z)
                exponential = fp32_exp(z - z_max)
                kept = inside & (exponential >= min_p) & ((order > k_cut) | ((order == k_cut) & (i <= k_id))) & ((order > p_cut) | ((order == p_cut) & (i <= p_id)))
                masses += tl.where(kept, mass_of(exponential), 0)
            total = tl.sum(masses, 0)
        for first in range(0, vocab_size, BLOCK):
            i = first + lane
            inside = i < vocab_size
            z = tl.div_rn(tl.load(logits_ptr + i, mask=inside, other=-INFINITY), tl.zeros((BLOCK,), tl.float32) + temperature)
            order = ordered_of(z)
            exponential = fp32_exp(z - z_max)
            kept = (exponential >= min_p) & ((order > k_cut) | ((order == k_cut) & (i <= k_id))) & ((order > p_cut) | ((order == p_cut) & (i <= p_id)))
            mass = tl.where(kept, mass_of(exponential), 0)
            prob = (mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)).to(tl.float32)
            tl.store(out_ptr + i, tl.where(random, prob, tl.where(i == token, 1.0, 0.0)), mask=inside)
    else:
        slot = tl.arange(0, MAX_CHILDREN)
        # The best so far, in no order; places that are not wanted look taken.
        keys = tl.where(slot < count, LEAST_KEY, GREATEST_KEY)
        if random:
            stream = 1 + 16 * (row % lanes).to(tl.int32)
            for first in range(0, vocab_size, BLOCK):
                i = first + lane
                inside = i < vocab_size
                z = tl.div_rn(tl.load(logits_ptr + i, mask=inside, other=-INFINITY), tl.zeros((BLOCK,), tl.float32) + temperature)
                order = ordered_of(z)
                kept = inside & (fp32_exp(z - z_max) >= min_p) & ((order > k_cut) | ((order == k_cut) & (i <= k_id))) & ((order > p_cut) | ((order == p_cut) & (i <= p_id)))
                s = tl.where(kept, z + gumbel_of(noise_words(seed, position, stream, first, BLOCK)), -INFINITY)
                offered = (ordered_of(s).to(tl.int64) << 32) | (0xFFFFFFFF - i.to(tl.int64))
                offered = tl.where(s > -INFINITY, offered, LEAST_KEY)
                greatest_key = tl.max(offered, 0)
                least_key = tl.min(keys, 0)
                while greatest_key > least_key:
                    place = tl.min(tl.where(keys == least_key, slot, MAX_CHILDREN), 0)
                    keys = tl.where(slot == place, greatest_key, keys)
                    offered = tl.where(offered == greatest_key, LEAST_KEY, offered)
                    greatest_key = tl.max(offered, 0)
                    least_key = tl.min(keys, 0)
        keys = tl.where(slot < count, keys, LEAST_KEY)
        for n in range(count):
            greatest_key = tl.max(keys, 0)
            drawn = tl.where(greatest_key == LEAST_KEY, -1, 0xFFFFFFFF - (greatest_key & 0xFFFFFFFF))
            drawn = tl.where(random, drawn, tl.where(n == 0, token.to(tl.int64), -1))
            tl.store(out_ptr + row * count + n, drawn)
            keys = tl.where(keys == greatest_key, LEAST_KEY, keys)


@triton.jit
def _write_log_prob(logits_ptr, log_prob_ptr, token, vocab_size, BLOCK: tl.constexpr):
    """log softmax(logits)[token], natural; -inf without a token."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -INFINITY, tl.float32)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        x = tl.load(logits_ptr + i, mask=i < vocab_size, other=-INFINITY)
        best = tl.where(x > best, x, best)
    greatest = tl.max(best, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        x = tl.load(logits_ptr + i, mask=i < vocab_size, other=-INFINITY)
        sums += fp32_exp(x - greatest)
    chosen = tl.load(logits_ptr + token, mask=token >= 0, other=-INFINITY)
    log_prob = (chosen - greatest) - fp32_log(tl.sum(sums, 0))
    log_prob = tl.where(greatest == INFINITY, tl.where(chosen == INFINITY, 0.0, -INFINITY), log_prob)
    tl.store(log_prob_ptr, tl.where(token < 0, -INFINITY, log_prob))
