"""The kernel behind sample, filter_probs and draw_children on CUDA."""

import triton
import triton.language as tl

from eagle_kernels.triton.fp32_math import fp32_exp, fp32_log
from eagle_kernels.triton.noise import gumbel_of, noise_words, token_words
from eagle_kernels.triton.sample_filters import INFINITY, NO_CUT, above_cut, choose_reach, collect, find_cut, load_x, load_z, mass_of, ordered_of, over_temperature

TOKENS, PROBS, CHILDREN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MAX_CHILDREN = tl.constexpr(64)
LEAST_KEY = tl.constexpr(-9223372036854775808)
GREATEST_KEY = tl.constexpr(9223372036854775807)


@triton.jit(do_not_specialize=["count", "has_bias", "has_counts", "has_frequency", "has_log_probs", "has_presence", "has_prompt", "has_repetition", "lanes", "min_p_first"])
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
    list_z_ptr,  # [rows, CAPACITY] fp32, scratch
    list_ids_ptr,  # [rows, CAPACITY] int32, scratch
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
    CAPACITY: tl.constexpr,
    NUM_THRESHOLDS: tl.constexpr,
):
    """One program per row. Grid (rows).

    A row without filters is read once. With filters it is read three times, to find the maximum, the distance from it that matters, and to list the tokens within; what
    follows reads the list. A row too flat for the list is read about 15 times per cut instead.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_x
    bias_ptr += row * vocab_size
    prompt_ptr += row * vocab_size
    counts_ptr += row * vocab_size
    list_z_ptr += row * CAPACITY
    list_ids_ptr += row * CAPACITY
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
    source = (logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, temperature)
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
        x = load_x(source, i, inside, ADJUST)
        nans = nans | (x != x).to(tl.int32)
        best_id = tl.where(x > best, i, best_id)
        best = tl.where(x > best, x, best)
        if MODE == TOKENS:
            if plain:
                s = over_temperature(x, source) + gumbel_of(noise_words(seed, position, 0, first, BLOCK))
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
            x = load_x(source, i, inside, ADJUST)
            hit = inside & (over_temperature(x, source) == z_max)
            best_id = tl.minimum(best_id, tl.where(hit, i, vocab_size))
        token = tl.min(best_id, 0)

    if MODE == TOKENS:
        if random & plain:
            best_score = tl.max(score, 0)
            token = tl.min(tl.where(score == best_score, score_id, vocab_size), 0)

    # Filters: the first may limit what the cuts count.
    least_exp = tl.where((min_p_first != 0) | ((use_top_k == 0) & (use_top_p == 0)), min_p, 0.0)
    k_cut = tl.min(lane, 0) + NO_CUT
    k_id = tl.min(lane, 0)
    p_cut = k_cut
    p_id = k_id
    reach = tl.min(lane, 0).to(tl.float32)
    num_listed = tl.min(lane, 0)
    total = row * 0
    if random & filtered:
        reach, total = choose_reach(source, z_max, least_exp, top_k, top_p, use_top_k.to(tl.int32), use_top_p.to(tl.int32), vocab_size, ADJUST, BLOCK, CAPACITY)
        if reach > 0.0:
            num_listed = collect(source, list_z_ptr, list_ids_ptr, z_max, least_exp, reach, vocab_size, ADJUST, BLOCK)
    num_all = tl.where(reach > 0.0, 0, vocab_size)
    listed = (list_z_ptr, list_ids_ptr, num_all, num_listed)
    num_entries = num_all + num_listed
    if random & filtered:
        if use_top_k:
            k_cut, k_id = find_cut(source, listed, z_max, least_exp, k_cut, k_id, top_k.to(tl.float64), False, ADJUST, BLOCK, NUM_THRESHOLDS)
            if use_top_p:
                # What top_k kept is the whole for top_p.
                masses = tl.zeros((BLOCK,), tl.int64)
                for first in range(0, num_entries, BLOCK):
                    i = first + lane
                    z, ids = load_z(source, listed, i, ADJUST)
                    exponential = fp32_exp(z - z_max)
                    kept = (i < num_entries) & (exponential >= least_exp) & above_cut(ordered_of(z), ids, k_cut, k_id)
                    masses += tl.where(kept, mass_of(exponential), 0)
                total = tl.sum(masses, 0)
        if use_top_p:
            p_cut, p_id = find_cut(source, listed, z_max, least_exp, k_cut, k_id, top_p.to(tl.float64) * total.to(tl.float64), True, ADJUST, BLOCK, NUM_THRESHOLDS)

    if MODE == TOKENS:
        if random & filtered:
            score = tl.full((BLOCK,), -INFINITY, tl.float32)
            score_id = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, num_entries, BLOCK):
                i = first + lane
                z, ids = load_z(source, listed, i, ADJUST)
                order = ordered_of(z)
                kept = (i < num_entries) & (fp32_exp(z - z_max) >= min_p) & above_cut(order, ids, k_cut, k_id) & above_cut(order, ids, p_cut, p_id)
                s = tl.where(kept, z + gumbel_of(token_words(seed, position, 0, ids)), -INFINITY)
                score_id = tl.where(s > score, ids, score_id)
                score = tl.where(s > score, s, score)
            best_score = tl.max(score, 0)
            token = tl.min(tl.where(score == best_score, score_id, vocab_size), 0)
            token = tl.where(best_score > -INFINITY, token, -1)  # min_p above 1 keeps nothing
        tl.store(out_ptr + row, token.to(tl.int64))
        if has_log_probs != 0:
            _write_log_prob(logits_ptr, log_probs_ptr + row, token, vocab_size, BLOCK)
    elif MODE == PROBS:
        out_ptr += row * vocab_size
        if random:
            masses = tl.zeros((BLOCK,), tl.int64)
            for first in range(0, num_entries, BLOCK):
                i = first + lane
                z, ids = load_z(source, listed, i, ADJUST)
                order = ordered_of(z)
                exponential = fp32_exp(z - z_max)
                kept = (i < num_entries) & (exponential >= min_p) & above_cut(order, ids, k_cut, k_id) & above_cut(order, ids, p_cut, p_id)
                masses += tl.where(kept, mass_of(exponential), 0)
            total = tl.sum(masses, 0)
        for first in range(0, vocab_size, BLOCK):
            i = first + lane
            inside = i < vocab_size
            z = over_temperature(load_x(source, i, inside, ADJUST), source)
            order = ordered_of(z)
            exponential = fp32_exp(z - z_max)
            kept = (exponential >= min_p) & above_cut(order, i, k_cut, k_id) & above_cut(order, i, p_cut, p_id)
            mass = tl.where(kept, mass_of(exponential), 0)
            prob = (mass.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)).to(tl.float32)
            tl.store(out_ptr + i, tl.where(random, prob, tl.where(i == token, 1.0, 0.0)), mask=inside)
    else:
        slot = tl.arange(0, MAX_CHILDREN)
        # The best so far, in no order; places that are not wanted look taken.
        keys = tl.where(slot < count, LEAST_KEY, GREATEST_KEY)
        if random:
            stream = 1 + 16 * (row % lanes).to(tl.int32)
            for first in range(0, num_entries, BLOCK):
                i = first + lane
                z, ids = load_z(source, listed, i, ADJUST)
                order = ordered_of(z)
                kept = (i < num_entries) & (fp32_exp(z - z_max) >= min_p) & above_cut(order, ids, k_cut, k_id) & above_cut(order, ids, p_cut, p_id)
                s = tl.where(kept, z + gumbel_of(token_words(seed, position, stream, ids)), -INFINITY)
                offered = (ordered_of(s).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
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
