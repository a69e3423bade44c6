"""Tree attention on the GPU: split over the paged prefix, then a merge by log-sum-exp (FlashDecoding: Dao et al., 2023), with the tree's mask in the last blocks only.

Row r of a tile is query head r % group of node r // group, so all query heads of one KV head share a tile and the prefix is read once per tile of rows. Scores are in base 2.

Two ways to cut the keys:
  shared  every split is an equal part of the prefix; the last one also takes the tentative rows, under the mask.
  exact   splits of SPLIT keys at absolute positions. Those that lie wholly in the prefix are shared by all nodes; what is above them is done for each node alone, with its ancestors gathered into the
          places where plain decoding would find them. Every row then meets the same keys in the same columns of the same tiles, whatever the tree: same bits.
"""

import triton
import triton.language as tl

from eagle_kernels.triton.common import dot, exp2
from eagle_kernels.triton.rounding import round_to
from eagle_kernels.triton.tree_mask import bitwise_or, count_bits, count_bits_32, low_bits, nth_set_bit, split_word, unpack_bits

NO_SPECIALIZATION = ["group", "num_queries", "num_heads", "num_kv_heads", "max_pages", "page_shift", "num_words", "num_splits", "window", "causal", "split_len", "has_lse"]


@triton.jit
def _row_offsets(page_table_ptr, b, position, ok, page_shift, max_pages, stride_page, stride_slot):
    """Offsets of logical rows [N] in one plane of the cache."""
    page = tl.load(page_table_ptr + b * max_pages + (position >> page_shift), mask=ok, other=0).to(tl.int64)
    slot = position & ((1 << page_shift) - 1)
    return page * stride_page + slot.to(tl.int64) * stride_slot


@triton.jit
def _attend(q, k_ptr, v_ptr, offsets, ok, visible, m, l, acc, scale, soft_cap, SOME_KEYS: tl.constexpr, MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One block of keys: the running maximum m [M], sum l [M] and accumulator acc [M, BLOCK_D] after it.

    SOME_KEYS: only the keys that are ok may be read; MASKED: a row sees only its visible keys. A block without a visible key leaves a row's m, l and acc as they were, bit for bit: its factor is exp2(0) and its terms are exact zeros.
    """
    d = tl.arange(0, BLOCK_D)
    if SOME_KEYS:
        # Rows that nobody sees may hold anything, NaN too: they are not read.
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=ok[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=ok[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D == HEAD_DIM:
        k = tl.load(k_ptr + offsets[None, :] + d[:, None])
        v = tl.load(v_ptr + offsets[:, None] + d[None, :])
    else:
        k = tl.load(k_ptr + offsets[None, :] + d[:, None], mask=(d < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_ptr + offsets[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    scores = dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32)) * scale
    if SOFT_CAP:
        if soft_cap > 0.0:
            scores = soft_cap * (1.0 - 2.0 / (exp2(scores * (2.8853900817779268 / soft_cap)) + 1.0))  # tanh(x) = 1 - 2 / (e^2x + 1)
    scores *= 1.4426950408889634
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = exp2(scores - base[:, None])
    factor = exp2(m - base)
    return m_new, l * factor + tl.sum(p, 1), dot(round_to(p, v.dtype), v, acc * factor[:, None])


@triton.jit
def _store_partial(partial_ptr, stats_ptr, first_row, row, ok, acc_ok, m, l, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A split without keys need not write its acc: the merge reads only its statistics. Rows first_row (int64) + row [M] of partial [rows, HEAD_DIM] and stats [rows, 2]. One wide base and narrow offsets: wide offsets for a whole tile cost 100 registers and spilled."""
    d = tl.arange(0, BLOCK_D)
    tl.store(partial_ptr + first_row * HEAD_DIM + (row[:, None] * HEAD_DIM + d[None, :]), acc, mask=acc_ok[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(stats_ptr + first_row * 2 + row * 2, m, mask=ok)
    tl.store(stats_ptr + first_row * 2 + (row * 2 + 1), l, mask=ok)


@triton.jit(do_not_specialize=NO_SPECIALIZATION)
def _shared_kernel(
    q_ptr,  # [B, Q, num_heads, HEAD_DIM]
    kv_ptr,  # [2, pages, page_size, num_kv_heads, HEAD_DIM]
    page_table_ptr,  # [B, max_pages] int32
    seq_lens_ptr,  # [B] int32
    mask_ptr,  # [B, Q, num_words] int64; not read when causal
    partial_ptr,  # [B, num_kv_heads, num_splits, Q x group, HEAD_DIM] fp32
    stats_ptr,  # [B, num_kv_heads, num_splits, Q x group, 2] fp32: m and l
    stride_qb, stride_qn, stride_qh, stride_plane, stride_page, stride_slot, stride_head,
    scale, soft_cap,
    group, num_queries, num_heads, num_kv_heads, max_pages, page_shift, num_words, num_splits, window, causal, split_len,
    GENERAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # BLOCK_N: 16, 32 or 64
):  # fmt: skip
    """Grid (programs, tiles of BLOCK_M rows, B x KV heads). window 0 is none; a window or a soft cap need GENERAL.

    split_len 0: program s < num_splits - 1 takes an equal part of the whole blocks of the prefix, without any mask; the last program takes what remains of the prefix and the tentative rows.
    split_len > 0 (exact mode): the programs take the whole splits of the prefix in turn, and nothing else.
    """
    b, h = tl.program_id(2) // num_kv_heads, tl.program_id(2) % num_kv_heads
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < num_queries * group
    node = tl.where(row_ok, row // group, 0)
    head = h * group + row % group
    d = tl.arange(0, BLOCK_D)
    q_offset = node * stride_qn + head * stride_qh
    q_ptrs = q_ptr + b.to(tl.int64) * stride_qb + (q_offset[:, None] + d[None, :])
    q_ok = row_ok[:, None] & (d < HEAD_DIM)[None, :]
    # Where registers are short the queries are loaded again, from the first-level cache, for every block: held over the loop they made sm_80 spill (640 bytes at head_dim 256 in the general form).
    q = tl.load(q_ptrs, mask=q_ok, other=0.0)
    k_ptr = kv_ptr + h.to(tl.int64) * stride_head
    v_ptr = k_ptr + stride_plane
    mask_row_ptr = mask_ptr + (b * num_queries + node).to(tl.int64) * num_words
    seq_len = tl.load(seq_lens_ptr + b)

    # Position of the first key that each row sees through the window; keys below `lowest` are seen by no row of the tile.
    first_key = tl.zeros([BLOCK_M], tl.int32)
    lowest = 0
    if GENERAL:
        if window > 0:
            ancestors = node + 1  # or self; the row's position is seq_len + ancestors - 1
            if causal == 0:
                ancestors = tl.zeros([BLOCK_M], tl.int32)
                for w in range(num_words):
                    ancestors += count_bits(tl.load(mask_row_ptr + w))
            first_key = tl.where(row_ok, seq_len + ancestors - window, 2147483647)
            lowest = tl.maximum(tl.min(first_key), 0) // BLOCK_N * BLOCK_N
    n = tl.arange(0, BLOCK_N)

    if (split_len > 0) | (tl.program_id(0) < num_splits - 1):
        length, first_split, last_split = split_len, tl.program_id(0), 0
        if split_len > 0:
            last_split = seq_len // split_len
        else:
            blocks = seq_len // BLOCK_N
            length = (blocks + num_splits - 2) // (num_splits - 1) * BLOCK_N
            last_split = first_split + 1
        for split in range(first_split, last_split, tl.num_programs(0)):
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            begin, end = split * length, tl.minimum((split + 1) * length, seq_len // BLOCK_N * BLOCK_N)
            begin = tl.maximum(begin, lowest)
            for start in range(begin, end, BLOCK_N):
                key = start + n
                offsets = _row_offsets(page_table_ptr, b, key, key >= 0, page_shift, max_pages, stride_page, stride_slot)
                visible = key[None, :] >= 0
                if GENERAL:
                    visible = key[None, :] >= first_key[:, None]
                if GENERAL or HEAD_DIM > 128:
                    q = tl.load(q_ptrs, mask=q_ok, other=0.0)
                m, l, acc = _attend(q, k_ptr, v_ptr, offsets, key >= 0, visible, m, l, acc, scale, soft_cap, False, GENERAL, GENERAL, HEAD_DIM, BLOCK_D)
            first_row = (tl.program_id(2).to(tl.int64) * num_splits + split) * num_queries * group
            acc_ok = row_ok
            if not GENERAL and HEAD_DIM <= 128:  # where registers are short it is written all the same
                acc_ok = row < tl.where(begin < end, num_queries * group, 0)
            _store_partial(partial_ptr, stats_ptr, first_row, row, row_ok, acc_ok, m, l, acc, HEAD_DIM, BLOCK_D)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        num_blocks, last_node = num_words * (64 // BLOCK_N), 0
        if causal != 0:
            last_node = tl.minimum((tl.program_id(1) * BLOCK_M + BLOCK_M - 1) // group + 1, num_queries)  # of this tile, exclusive
            num_blocks = (last_node + BLOCK_N - 1) // BLOCK_N
        before = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)  # position of the last ancestor in the blocks before this one
        for w in tl.range(-1, num_blocks, num_stages=1):
            key = seq_len // BLOCK_N * BLOCK_N + n
            ok = key < seq_len
            visible = row_ok[:, None] & ok[None, :]
            if GENERAL:
                visible = visible & (key[None, :] >= first_key[:, None])
            if GENERAL or HEAD_DIM > 128:
                q = tl.load(q_ptrs, mask=q_ok, other=0.0)
            if w >= 0:
                key = seq_len + w * BLOCK_N + n
                if causal != 0:
                    ok = w * BLOCK_N + n < last_node
                    visible = (w * BLOCK_N + n)[None, :] <= node[:, None]
                    if GENERAL:
                        visible = visible & (key[None, :] >= first_key[:, None])
                else:
                    low, high = split_word(tl.load(mask_row_ptr + w * BLOCK_N // 64, mask=row_ok, other=0) >> (w * BLOCK_N % 64))
                    # With a window: an ancestor's position counts those before it.
                    if BLOCK_N < 64:
                        low &= -1 if BLOCK_N == 32 else (1 << BLOCK_N) - 1
                        ok = ((tl.reduce(low, 0, bitwise_or) >> n) & 1) != 0
                        visible = ((low[:, None] >> n[None, :]) & 1) != 0
                        if GENERAL:
                            visible = visible & (before[:, None] + count_bits_32(low[:, None] & low_bits(n)[None, :]) >= first_key[:, None])
                            before += count_bits_32(low)
                    else:
                        ok = unpack_bits(tl.reduce(low, 0, bitwise_or), tl.reduce(high, 0, bitwise_or), n)
                        visible = unpack_bits(low[:, None], high[:, None], n[None, :])
                        if GENERAL:
                            up_to = count_bits_32(low[:, None] & low_bits(n)[None, :]) + count_bits_32(high[:, None] & low_bits(n - 32)[None, :])
                            visible = visible & (before[:, None] + up_to >= first_key[:, None])
                            before += count_bits_32(low) + count_bits_32(high)
            offsets = _row_offsets(page_table_ptr, b, key, ok, page_shift, max_pages, stride_page, stride_slot)
            m, l, acc = _attend(q, k_ptr, v_ptr, offsets, ok, visible, m, l, acc, scale, soft_cap, True, True, GENERAL, HEAD_DIM, BLOCK_D)
        first_row = (tl.program_id(2).to(tl.int64) * num_splits + num_splits - 1) * num_queries * group
        _store_partial(partial_ptr, stats_ptr, first_row, row, row_ok, row_ok, m, l, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=NO_SPECIALIZATION)
def _own_kernel(
    q_ptr, kv_ptr, page_table_ptr, seq_lens_ptr, mask_ptr, partial_ptr, stats_ptr,
    stride_qb, stride_qn, stride_qh, stride_plane, stride_page, stride_slot, stride_head,
    scale, soft_cap,
    group, num_queries, num_heads, num_kv_heads, max_pages, page_shift, num_words, num_splits, window, causal, split_len,
    GENERAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Exact mode, arguments as in _shared_kernel. Grid (Q, B x KV heads): the keys of one node from the last whole split of the prefix up to the node itself, its ancestors in order of depth. The tile has
    as many rows as the shared one, of which `group` are used, so that both run the same instructions."""
    node = tl.program_id(0)
    b, h = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    row = tl.arange(0, BLOCK_M)
    row_ok = row < group
    head = h * group + tl.where(row_ok, row, 0)
    d = tl.arange(0, BLOCK_D)
    q_offset = node * stride_qn + head * stride_qh
    q = tl.load(q_ptr + b.to(tl.int64) * stride_qb + (q_offset[:, None] + d[None, :]), mask=row_ok[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    k_ptr = kv_ptr + h.to(tl.int64) * stride_head
    v_ptr = k_ptr + stride_plane
    mask_row_ptr = mask_ptr + (b * num_queries + node).to(tl.int64) * num_words
    seq_len = tl.load(seq_lens_ptr + b)
    ancestors = node + 1
    if causal == 0:
        ancestors = 0
        for w in range(num_words):
            ancestors += count_bits(tl.load(mask_row_ptr + w))
    end = seq_len + ancestors
    lowest = 0
    if window > 0:
        lowest = tl.maximum(end - window, 0)
    n = tl.arange(0, BLOCK_N)
    for split in range(seq_len // split_len, (end + split_len - 1) // split_len):
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(split * split_len, tl.minimum((split + 1) * split_len, end), BLOCK_N):
            key = start + n
            ok = (key < end) & (key >= lowest)
            rank = key - seq_len  # >= 0: which ancestor
            place = key
            if causal == 0:
                place = tl.where(rank < 0, key, seq_len + nth_set_bit(mask_row_ptr, num_words, rank))
            offsets = _row_offsets(page_table_ptr, b, place, ok, page_shift, max_pages, stride_page, stride_slot)
            visible = row_ok[:, None] & ok[None, :]
            m, l, acc = _attend(q, k_ptr, v_ptr, offsets, ok, visible, m, l, acc, scale, soft_cap, True, True, GENERAL, HEAD_DIM, BLOCK_D)
        first_row = ((tl.program_id(1).to(tl.int64) * num_splits + split) * num_queries + node) * group
        _store_partial(partial_ptr, stats_ptr, first_row, row, row_ok, row_ok, m, l, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=NO_SPECIALIZATION)
def _merge_kernel(
    partial_ptr, stats_ptr, seq_lens_ptr, mask_ptr,
    out_ptr,  # [B, Q, num_heads, HEAD_DIM]
    lse_ptr,  # [B, Q, num_heads] fp32, or anything when HAS_LSE is false
    stride_ob, stride_on, stride_oh,
    num_queries, num_heads, num_kv_heads, num_words, num_splits, window, causal, split_len, has_lse,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (query heads, Q, B): the splits of one row, added in a fixed order of their numbers."""
    h, node, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = 0, num_splits  # the splits that were written for this row
    if split_len > 0:
        ancestors = node + 1
        if causal == 0:
            ancestors = 0
            for w in range(num_words):
                ancestors += count_bits(tl.load(mask_ptr + (b * num_queries + node).to(tl.int64) * num_words + w))
        end = tl.load(seq_lens_ptr + b) + ancestors
        last = (end + split_len - 1) // split_len
        if window > 0:
            first = tl.maximum(end - window, 0) // split_len
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    group = num_heads // num_kv_heads
    rows_per_split = num_queries * group
    first_row = (b * num_kv_heads + h // group).to(tl.int64) * num_splits * rows_per_split + node * group + h % group
    m = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for start in range(first // BLOCK_S * BLOCK_S, last, BLOCK_S):
        ok = (start + s >= first) & (start + s < last)
        m = tl.maximum(m, tl.load(stats_ptr + (first_row + (start + s) * rows_per_split) * 2, mask=ok, other=float("-inf")))
    top = tl.max(m, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first // BLOCK_S * BLOCK_S, last, BLOCK_S):
        ok = (start + s >= first) & (start + s < last)
        rows = first_row + (start + s) * rows_per_split
        weight = exp2(tl.load(stats_ptr + rows * 2, mask=ok, other=float("-inf")) - base)
        total += tl.sum(weight * tl.load(stats_ptr + rows * 2 + 1, mask=ok, other=0.0), 0)
        part = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + d[None, :], mask=(weight > 0.0)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
    result = tl.where(total > 0.0, acc / tl.where(total > 0.0, total, 1.0), 0.0)
    out_offset = b.to(tl.int64) * stride_ob + node.to(tl.int64) * stride_on + h.to(tl.int64) * stride_oh
    tl.store(out_ptr + out_offset + d, round_to(result, out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    if has_lse != 0:
        lse = tl.where(total > 0.0, (top + tl.log2(tl.where(total > 0.0, total, 1.0))) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + (b * num_queries + node) * num_heads + h, lse)
