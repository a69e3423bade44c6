// exp and log in fp32 by fixed operations, and floats as integers of the same order: one text for host and device, so that every backend gets the same bits.
// The numbers are those of eagle_kernels/reference/fp32_math.py and gumbel_noise.py. Needs -ffp-contract=off (g++) or -fmad=false (nvcc).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define EAGLE_HOST_DEVICE __host__ __device__
#else
#define EAGLE_HOST_DEVICE
#endif

namespace eagle {

EAGLE_HOST_DEVICE inline float float_of_bits(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
EAGLE_HOST_DEVICE inline int32_t bits_of_float(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// exp(x): 0 below -87.3, the value at 88.3 above it.
EAGLE_HOST_DEVICE inline float fp32_exp(float x) {
    const float clamped = x < -87.3f ? -87.3f : x > 88.3f ? 88.3f : x;
    const float n = fmaf(clamped, 1.44269504f, 12582912.0f) - 12582912.0f;
    float r = fmaf(n, -0.693359375f, clamped);
    r = fmaf(n, 2.12194440e-4f, r);
    float series = 0.0013934545f;
    series = fmaf(series, r, 0.008363777f);
    series = fmaf(series, r, 0.041666456f);
    series = fmaf(series, r, 0.16666573f);
    series = fmaf(series, r, 0.5f);
    const float y = fmaf(r * r, series, r) + 1.0f;
    return x < -87.3f ? 0.0f : y * float_of_bits((static_cast<int32_t>(n) + 127) << 23);
}

// Natural log of a positive normal number.
EAGLE_HOST_DEVICE inline float fp32_log(float x) {
    const int32_t shifted = bits_of_float(x) - 0x3F3504F3;
    const float t = float_of_bits((shifted & 0x7FFFFF) + 0x3F3504F3) - 1.0f, exponent = static_cast<float>(shifted >> 23);
    const float square = t * t;
    float series = 0.07149754f;
    series = fmaf(series, t, -0.11571201f);
    series = fmaf(series, t, 0.11661511f);
    series = fmaf(series, t, -0.124110505f);
    series = fmaf(series, t, 0.14249937f);
    series = fmaf(series, t, -0.1666848f);
    series = fmaf(series, t, 0.20000708f);
    series = fmaf(series, t, -0.2499999f);
    series = fmaf(series, t, 0.3333333f);
    float tail = fmaf(square * t, series, exponent * -2.12194440e-4f);
    tail = fmaf(square, -0.5f, tail);
    return fmaf(exponent, 0.693359375f, t + tail);
}

// An integer in the order of the floats; NaN counts as -inf, -0 as +0.
EAGLE_HOST_DEVICE inline int32_t ordered(float x) {
    const int32_t bits = bits_of_float(x == x ? x + 0.0f : -INFINITY);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
// Key of (value descending, index ascending): the greater key is the better one. No two indices have the same key.
EAGLE_HOST_DEVICE inline int64_t ordered_key(float x, uint32_t index) {
    return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(ordered(x))) << 32) | (0xFFFFFFFFu - index));
}
EAGLE_HOST_DEVICE inline float value_of_key(int64_t key) {
    const int32_t high = static_cast<int32_t>(key >> 32);
    return float_of_bits(high ^ ((high >> 31) & 0x7FFFFFFF));
}
EAGLE_HOST_DEVICE inline uint32_t index_of_key(int64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(static_cast<uint64_t>(key) & 0xFFFFFFFFu); }
constexpr int64_t kPaddingKey = INT64_MIN;  // loses against every key

// Score of a child: its parent's plus its log-probability, which rounding must not lift above 0 (a child must not outrank its parent).
// log_sum_exp is not looked at when the greatest logit of the row is infinite.
EAGLE_HOST_DEVICE inline float child_score(float parent_score, float logit, float greatest, float log_sum_exp) {
    float log_prob = logit - log_sum_exp;
    if (greatest == INFINITY) log_prob = logit == INFINITY ? 0.0f : -INFINITY;
    if (logit == -INFINITY) log_prob = -INFINITY;
    if (log_prob > 0.0f) log_prob = 0.0f;
    const float score = parent_score + log_prob;
    return score == score ? score : float_of_bits(0x7FC00000);  // processors differ in the NaN they make
}

}  // namespace eagle
