"""The filters of sample, filter_probs and draw_children on CUDA: each keeps a leading part of the order (z descending, id ascending), and the cuts are found without sorting.

What decides are fixed fp32 operations, integers and single fp64 comparisons, so that exactly the tokens of eagle_kernels/reference/sample.py stay: z = x / temperature is
an IEEE division, probability masses exp(z - max z) are integers in units of 2^-40, and ordered(z) is the int32 that ascends with z.
"""

import triton
import triton.language as tl

from eagle_kernels.triton.fp32_math import fp32_exp

NO_CUT = tl.constexpr(-2147483648)  # below ordered(-inf)
INFINITY = tl.constexpr(float("inf"))


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
def above_cut(order, ids, cut, cut_id):
    return (order > cut) | ((order == cut) & (ids <= cut_id))


@triton.jit
def load_x(source, i, inside, ADJUST: tl.constexpr):
    """Logits after bias and penalties; -inf outside. A penalty that is absent is 1 or 0, which changes nothing.

    source  (logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, temperature) of the row
    """
    logits_ptr, bias_ptr, prompt_ptr, counts_ptr, has_bias, has_prompt, has_counts, repetition, presence, frequency, temperature = source
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
def over_temperature(x, source):
    """z, by an IEEE division."""
    return tl.div_rn(x, tl.zeros_like(x) + source[10])


@triton.jit
def load_z(source, listed, i, ADJUST: tl.constexpr):
    """z and id of entry i of the whole row (num_all of them) or of the list (num_listed); the other number is 0. z is -inf past the end.

    listed  (list_z_ptr, list_ids_ptr, num_all, num_listed)
    """
    list_z_ptr, list_ids_ptr, num_all, num_listed = listed
    x = load_x(source, i, i < num_all, ADJUST)
    from_list = i < num_listed
    z = tl.where(from_list, tl.load(list_z_ptr + i, mask=from_list, other=0.0), over_temperature(x, source))
    return z, tl.where(from_list, tl.load(list_ids_ptr + i, mask=from_list, other=0), i)


@triton.jit
def choose_reach(source, z_max, least_exp, top_k, top_p, use_top_k, use_top_p, vocab_size, ADJUST: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """A distance from the maximum, 6 or 12, within which all cuts lie and no more than CAPACITY tokens; 0 if there is none. Also the mass of all tokens. One pass over the row."""
    lane = tl.arange(0, BLOCK)
    reach = (6 << tl.arange(0, 2)).to(tl.float32)
    counts = tl.zeros((BLOCK, 2), tl.int32)
    masses = tl.zeros((BLOCK, 2), tl.int64)
    all_counts = tl.zeros((BLOCK,), tl.int32)
    all_masses = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        inside = i < vocab_size
        x = load_x(source, i, inside, ADJUST)
        below = over_temperature(x, source) - z_max
        exponential = fp32_exp(below)
        counted = inside & (exponential >= least_exp)
        near = (below[:, None] > -reach[None, :]) & counted[:, None]
        counts += near.to(tl.int32)
        weight = tl.where(counted, mass_of(exponential), 0)
        masses += tl.where(near, weight[:, None], 0)
        all_counts += counted.to(tl.int32)
        all_masses += weight
    count = tl.sum(counts, 0)
    mass = tl.sum(masses, 0)
    total = tl.sum(all_masses, 0)
    enough = count == tl.sum(all_counts, 0)
    enough_tokens = enough | (count >= top_k)
    enough_mass = enough | (mass.to(tl.float64) >= top_p.to(tl.float64) * total.to(tl.float64))
    neither = tl.zeros_like(count)
    enough = tl.where(neither < use_top_k, enough_tokens.to(tl.int32), tl.where(neither < use_top_p, enough_mass.to(tl.int32), enough.to(tl.int32)))
    chosen = tl.min(tl.where((enough != 0) & (count <= CAPACITY), reach, 64.0), 0)
    return tl.where(chosen < 64.0, chosen, 0.0), total


@triton.jit
def collect(source, list_z_ptr, list_ids_ptr, z_max, least_exp, reach, vocab_size, ADJUST: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the tokens within reach, ids ascending, to the list; returns their number."""
    lane = tl.arange(0, BLOCK)
    num_listed = tl.min(lane, 0)
    for first in range(0, vocab_size, BLOCK):
        i = first + lane
        inside = i < vocab_size
        x = load_x(source, i, inside, ADJUST)
        z = over_temperature(x, source)
        below = z - z_max
        near = inside & (below > -reach) & (fp32_exp(below) >= least_exp)
        place = num_listed + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(list_z_ptr + place, z, mask=near)
        tl.store(list_ids_ptr + place, i, mask=near)
        num_listed += tl.sum(near.to(tl.int32), 0)
    tl.debug_barrier()  # other threads read the list
    return num_listed


@triton.jit
def find_cut(source, listed, z_max, least_exp, after, after_id, limit, USE_MASS: tl.constexpr, ADJUST: tl.constexpr, BLOCK: tl.constexpr, NUM_THRESHOLDS: tl.constexpr):
    """Where the order reaches `limit` (fp64), counted in tokens or in mass, of the tokens above the cut (after, after_id) with an exponential of least_exp or more.

    returns  (cut, cut_id): those tokens stay that have ordered(z) > cut, or ordered(z) == cut and id <= cut_id; one at least

    The weight above a threshold falls as the threshold rises: bisection over the integers, NUM_THRESHOLDS of them per pass.
    """
    lane = tl.arange(0, BLOCK)
    num_entries = listed[2] + listed[3]
    j = tl.arange(0, NUM_THRESHOLDS)
    high = ordered_of(z_max).to(tl.int64) + 1  # holds less than `limit`
    if USE_MASS:
        low = ordered_of(z_max - 32.0).to(tl.int64)  # holds all mass
    else:
        low = high * 0 + NO_CUT  # holds all tokens
    above = high * 0  # weight of what is at `high` or above
    while high - low > 1:
        threshold = low + (high - low) * (j + 1) // (NUM_THRESHOLDS + 1)
        if USE_MASS:
            sums = tl.zeros((BLOCK, NUM_THRESHOLDS), tl.int64)
        else:
            sums = tl.zeros((BLOCK, NUM_THRESHOLDS), tl.int32)
        narrow = threshold.to(tl.int32)[None, :]
        for first in range(0, num_entries, BLOCK):
            i = first + lane
            z, ids = load_z(source, listed, i, ADJUST)
            order = ordered_of(z)
            exponential = fp32_exp(z - z_max)
            counted = (i < num_entries) & (exponential >= least_exp) & above_cut(order, ids, after, after_id)
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
    # How many of the tokens at the cut, which all weigh the same, are needed.
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
    for first in range(0, num_entries, BLOCK):
        i = first + lane
        z, ids = load_z(source, listed, i, ADJUST)
        order = ordered_of(z)
        counted = (i < num_entries) & (fp32_exp(z - z_max) >= least_exp) & above_cut(order, ids, after, after_id)
        at_cut = (counted & (order == cut)).to(tl.int32)
        place = seen + tl.cumsum(at_cut, 0).to(tl.int64)
        last = tl.where((at_cut != 0) & (place <= needed), ids, last)
        seen += tl.sum(at_cut, 0).to(tl.int64)
    return cut, tl.max(last, 0)
