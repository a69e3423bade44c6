// Sixteen fp32 lanes, the one vector type of the CPU kernels.
//
// Included once per code path (isa_avx512.cpp, isa_avx2.cpp, isa_portable.cpp), inside the namespace EK_ISA. Every operation is either exact per lane (IEEE add, mul,
// fma, div, sqrt) or a fixed sequence of such operations, and reductions use one fixed tree, so that all code paths give the same bits.
// max and min follow x86: `a > b ? a : b`, so a NaN in either operand gives b.

#if defined(EK_AVX512)

struct f32x16 {
    __m512 v;
};
static inline f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
static inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// Lanes where x < limit become 0; a NaN lane stays NaN.
static inline f32x16 zero_below(f32x16 value, f32x16 x, f32x16 limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), value.v)};
}
// x * 2^n for integral n held as fp32 in [-126, 127]
static inline f32x16 scale_by_power(f32x16 x, f32x16 n) {
    const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(bits))};
}
static inline bool any_greater(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
static inline bool any_nan(f32x16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
// Lane j is the bf16 number at p[2j], or at p[2j + 1].
static inline f32x16 load_bf16_even(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
static inline f32x16 load_bf16_odd(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}

#elif defined(EK_AVX2)

struct f32x16 {
    __m256 lo, hi;
};
static inline f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, f32x16 x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
static inline f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline f32x16 zero_below(f32x16 value, f32x16 x, f32x16 limit) {
    return {_mm256_and_ps(value.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ)), _mm256_and_ps(value.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ))};
}
static inline __m256 power_of_two(__m256 n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)); }
static inline f32x16 scale_by_power(f32x16 x, f32x16 n) { return {_mm256_mul_ps(x.lo, power_of_two(n.lo)), _mm256_mul_ps(x.hi, power_of_two(n.hi))}; }
static inline bool any_greater(f32x16 a, f32x16 b) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) != 0;
}
static inline bool any_nan(f32x16 a) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))) != 0;
}
static inline __m256i load_words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline f32x16 load_bf16_even(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(load_words(p), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(load_words(p + 16), 16))};
}
static inline f32x16 load_bf16_odd(const uint16_t* p) {
    const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(load_words(p), high_half)), _mm256_castsi256_ps(_mm256_and_si256(load_words(p + 16), high_half))};
}

#else

struct f32x16 {
    alignas(64) float v[16];
};
#define EK_LANES for (int j = 0; j < 16; ++j)
static inline float float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline f32x16 set1(float x) { f32x16 r; EK_LANES r.v[j] = x; return r; }
static inline f32x16 load(const float* p) { f32x16 r; EK_LANES r.v[j] = p[j]; return r; }
static inline void store(float* p, const f32x16& x) { EK_LANES p[j] = x.v[j]; }
static inline f32x16 add(const f32x16& a, const f32x16& b) { f32x16 r; EK_LANES r.v[j] = a.v[j] + b.v[j]; return r; }
static inline f32x16 sub(const f32x16& a, const f32x16& b) { f32x16 r; EK_LANES r.v[j] = a.v[j] - b.v[j]; return r; }
static inline f32x16 mul(const f32x16& a, const f32x16& b) { f32x16 r; EK_LANES r.v[j] = a.v[j] * b.v[j]; return r; }
static inline f32x16 div(const f32x16& a, const f32x16& b) { f32x16 r; EK_LANES r.v[j] = a.v[j] / b.v[j]; return r; }
static inline f32x16 fma(const f32x16& a, const f32x16& b, const f32x16& c) { f32x16 r; EK_LANES r.v[j] = __builtin_fmaf(a.v[j], b.v[j], c.v[j]); return r; }
static inline f32x16 max(const f32x16& a, const f32x16& b) { f32x16 r; EK_LANES r.v[j] = a.v[j] > b.v[j] ? a.v[j] : b.v[j]; return r; }
static inline f32x16 min(const f32x16& a, const f32x16& b) { f32x16 r; EK_LANES r.v[j] = a.v[j] < b.v[j] ? a.v[j] : b.v[j]; return r; }
static inline f32x16 zero_below(const f32x16& value, const f32x16& x, const f32x16& limit) { f32x16 r; EK_LANES r.v[j] = x.v[j] < limit.v[j] ? 0.0f : value.v[j]; return r; }
static inline f32x16 scale_by_power(const f32x16& x, const f32x16& n) {
    f32x16 r;
    // A NaN has no integer value; its lane must stay NaN whatever the power.
    EK_LANES r.v[j] = x.v[j] * float_from_bits(static_cast<uint32_t>((n.v[j] == n.v[j] ? static_cast<int>(n.v[j]) : 0) + 127) << 23);
    return r;
}
static inline bool any_greater(const f32x16& a, const f32x16& b) { bool r = false; EK_LANES r |= a.v[j] > b.v[j]; return r; }
static inline bool any_nan(const f32x16& a) { bool r = false; EK_LANES r |= a.v[j] != a.v[j]; return r; }
static inline f32x16 load_bf16_even(const uint16_t* p) { f32x16 r; EK_LANES r.v[j] = float_from_bits(static_cast<uint32_t>(p[2 * j]) << 16); return r; }
static inline f32x16 load_bf16_odd(const uint16_t* p) { f32x16 r; EK_LANES r.v[j] = float_from_bits(static_cast<uint32_t>(p[2 * j + 1]) << 16); return r; }
#undef EK_LANES

#endif

// out[c * stride + r] = rows[r][c] for eight rows and eight columns
#if defined(EK_AVX512) || defined(EK_AVX2)
static inline void transpose_8x8(const float* const* rows, float* out, int64_t stride) {
    __m256 a[8], b[8];
    for (int r = 0; r < 8; ++r) a[r] = _mm256_loadu_ps(rows[r]);
    for (int r = 0; r < 8; r += 2) b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]), b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
    for (int r = 0; r < 8; r += 4) {
        a[r] = _mm256_shuffle_ps(b[r], b[r + 2], 0x44), a[r + 1] = _mm256_shuffle_ps(b[r], b[r + 2], 0xEE);
        a[r + 2] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0x44), a[r + 3] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0xEE);
    }
    for (int c = 0; c < 4; ++c) {
        _mm256_storeu_ps(out + c * stride, _mm256_permute2f128_ps(a[c], a[c + 4], 0x20));
        _mm256_storeu_ps(out + (c + 4) * stride, _mm256_permute2f128_ps(a[c], a[c + 4], 0x31));
    }
}
#else
static inline void transpose_8x8(const float* const* rows, float* out, int64_t stride) {
    for (int r = 0; r < 8; ++r)
        for (int c = 0; c < 8; ++c) out[c * stride + r] = rows[r][c];
}
#endif

static inline f32x16 zero() { return set1(0.0f); }

// count < 16 leading lanes from memory, the rest `fill`
static inline f32x16 load_partial(const float* p, int64_t count, float fill) {
    float lanes[16];
    for (int j = 0; j < 16; ++j) lanes[j] = j < count ? p[j] : fill;
    return load(lanes);
}
static inline void store_partial(float* p, f32x16 x, int64_t count) {
    float lanes[16];
    store(lanes, x);
    for (int j = 0; j < count; ++j) p[j] = lanes[j];
}

// The one reduction tree: lane j with lane j + 8, then + 4, + 2, + 1.
static inline float reduce_add(f32x16 x) {
    float lanes[16];
    store(lanes, x);
    for (int width = 8; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) lanes[j] = lanes[j] + lanes[j + width];
    return lanes[0];
}
static inline float reduce_max(f32x16 x) {
    float lanes[16];
    store(lanes, x);
    float best = lanes[0];
    for (int j = 1; j < 16; ++j) best = lanes[j] > best ? lanes[j] : best;
    return best;
}

// exp(x) = 2^n (1 + q): n and q for x in [-87.3, 88.3], clamped to it.
struct ExpParts {
    f32x16 n, q;
};
static inline ExpParts exp_parts(f32x16 x) {
    const f32x16 round_to_integer = set1(12582912.0f);
    const f32x16 clamped = max(set1(-87.3f), min(set1(88.3f), x));
    const f32x16 n = sub(fma(clamped, set1(1.44269504f), round_to_integer), round_to_integer);
    f32x16 r = fma(n, set1(-0.693359375f), clamped);
    r = fma(n, set1(2.12194440e-4f), r);
    f32x16 series = set1(0.0013934545f);
    series = fma(series, r, set1(0.008363777f));
    series = fma(series, r, set1(0.041666456f));
    series = fma(series, r, set1(0.16666573f));
    series = fma(series, r, set1(0.5f));
    return {n, fma(mul(r, r), series, r)};
}
// exp(x) for x <= 88.3 (larger x are clamped there), 0 below -87.3; max relative error 8.8e-8. Coefficients: least squares at 200 Chebyshev nodes of (exp(r) - 1 - r) / r^2.
static inline f32x16 exp(f32x16 x) {
    const ExpParts parts = exp_parts(x);
    return zero_below(scale_by_power(add(parts.q, set1(1.0f)), parts.n), x, set1(-87.3f));
}
// exp(x) - 1, with the relative accuracy of exp near 0 too
static inline f32x16 expm1(f32x16 x) {
    const ExpParts parts = exp_parts(x);
    const f32x16 power = scale_by_power(set1(1.0f), parts.n);
    return fma(parts.q, power, sub(power, set1(1.0f)));
}
static inline float exp_scalar(float x) {
    float lanes[16];
    store(lanes, exp(set1(x)));
    return lanes[0];
}

// Natural log of (1 + t) * 2^exponent, t in [sqrt(1/2) - 1, sqrt(2) - 1]; the same polynomial as eagle_kernels/reference/gumbel_noise.py.
static inline float log1p_scaled(float t, float exponent) {
    const float square = t * t;
    float series = 0.07149754f;
    series = __builtin_fmaf(series, t, -0.11571201f);
    series = __builtin_fmaf(series, t, 0.11661511f);
    series = __builtin_fmaf(series, t, -0.124110505f);
    series = __builtin_fmaf(series, t, 0.14249937f);
    series = __builtin_fmaf(series, t, -0.1666848f);
    series = __builtin_fmaf(series, t, 0.20000708f);
    series = __builtin_fmaf(series, t, -0.2499999f);
    series = __builtin_fmaf(series, t, 0.3333333f);
    float tail = __builtin_fmaf(square * t, series, exponent * -2.12194440e-4f);
    tail = __builtin_fmaf(square, -0.5f, tail);
    return __builtin_fmaf(exponent, 0.693359375f, t + tail);
}
// Natural log of a positive normal number.
static inline float log_scalar(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    const int32_t shifted = bits - 0x3F3504F3;
    const int32_t mantissa_bits = (shifted & 0x7FFFFF) + 0x3F3504F3;
    float mantissa;
    memcpy(&mantissa, &mantissa_bits, 4);
    return log1p_scaled(mantissa - 1.0f, static_cast<float>(shifted >> 23));
}
