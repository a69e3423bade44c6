"""Packed ancestor masks inside Triton kernels. Words are taken apart into 32-bit halves, which take half the registers; no population count is portable over Triton's backends and its interpreter."""

import triton
import triton.language as tl


@triton.jit
def split_word(words):
    """Low and high halves of int64 words, as int32."""
    return words.to(tl.int32), (words >> 32).to(tl.int32)


@triton.jit
def bitwise_or(a, b):
    return a | b


@triton.jit
def unpack_bits(low, high, bit):
    """Bit number `bit` (0 to 63) of the words whose int32 halves are low and high, as bool."""
    return ((tl.where(bit < 32, low, high) >> (bit & 31)) & 1) != 0


@triton.jit
def low_bits(n):
    """int32 with bits 0 .. n set; none for n < 0, all for n >= 31."""
    return tl.where(n < 0, 0, tl.where(n >= 31, -1, (2 << tl.minimum(tl.maximum(n, 0), 30)) - 1))


@triton.jit
def count_bits_32(words):
    """Set bits of int32 words of any shape."""
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)


@triton.jit
def count_bits(words):
    """Set bits of int64 words of any shape, as int32."""
    low, high = split_word(words)
    return count_bits_32(low) + count_bits_32(high)


@triton.jit
def nth_set_bit(mask_row_ptr, num_words, rank):
    """Place of the rank-th set bit (from 0) of a mask row of num_words int64 words, for a block of ranks [N] int32; 0 for ranks that do not exist."""
    bit = tl.arange(0, 32)
    place = tl.zeros(rank.shape, tl.int32)
    before = 0
    for w in range(2 * num_words):
        word = tl.load(mask_row_ptr + w // 2)
        half = (word >> (w % 2 * 32)).to(tl.int32)
        order = before + count_bits_32(half & ((1 << bit) - 1))
        is_set = ((half >> bit) & 1) != 0
        hit = is_set[None, :] & (order[None, :] == rank[:, None])
        place += tl.sum(tl.where(hit, w * 32 + bit[None, :], 0), 1)
        before += count_bits_32(half)
    return place
