// Vectors of floats as wide as the machine's, and the functions of them that the operators need.
#pragma once
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef double dvec __attribute__((vector_size(LANES * 8)));
typedef int ivec __attribute__((vector_size(LANES * 4)));

typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // a vector anywhere in memory

static inline vec load(const float* p) { return *(const loose*)p; }
static inline void store(float* p, vec v) { *(loose*)p = v; }
static inline vec all(float f) { return f - vec{}; }
static inline vec load_part(const float* p, int n) { vec v{}; std::memcpy(&v, p, n * sizeof(float)); return v; }
static inline void store_part(float* p, vec v, int n) { std::memcpy(p, &v, n * sizeof(float)); }
#if defined(__AVX__) && !defined(__AVX512F__)
static inline vec choose(ivec which, vec a, vec b) { return (vec)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)which); }
static inline vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }  // b where either is not a number
static inline vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }

// All lanes by halves: few steps, and always the same ones.
static inline float sum(vec v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline float largest(vec v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
#else
static inline vec choose(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }
static inline vec smaller(vec a, vec b) { return choose(a < b, a, b); }
static inline float sum(vec v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}
static inline float largest(vec v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
    return v[0];
}
#endif
static inline ivec count_up() { ivec v; for (int i = 0; i < LANES; i++) v[i] = i; return v; }

constexpr float LOWEST = -87.336544f, HIGHEST = 88.02969f;  // where exp leaves the range of normal numbers

// exp to about 2 units in the last place, between LOWEST and HIGHEST: 2^n times a polynomial of the rest
static inline vec exp_within(vec y) {
    vec scaled = y * 1.44269504f + 12582912.f;  // the magic number leaves round(y / ln 2) in the low bits
    ivec n = (ivec)scaled - 0x4B400000;
    vec whole = scaled - 12582912.f;
    vec r = y - whole * 0.693359375f - whole * -2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return p * (vec)((n + 127) << 23);
}

// below 2^-126 it is 0, NaN stays NaN
static inline vec exp(vec x) {
    const vec low = all(LOWEST), high = all(HIGHEST), value = exp_within(larger(low, smaller(high, x)));
    return choose(x < low, vec{}, choose(x > high, value * all(__builtin_inff()), value));
}

constexpr float LOG2_E = 1.44269504f;

// 2^x of -126 <= x <= 0 to about 2 units in the last place: fewer steps than exp
static inline vec exp2_within(vec x) {
    const vec scaled = x + 12582912.f, r = x - (scaled - 12582912.f);
    vec p = r * 1.535336188e-4f + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.f;
    return (vec)((ivec)p + ((ivec)scaled << 23));
}

// 2^x of x <= 0 (or a rounding above); below 2^-126 it is 0, NaN stays NaN
static inline vec exp2_falling(vec x) {
    const vec low = all(-126.f);
    return choose(x < low, vec{}, exp2_within(larger(low, x)));
}

static inline vec sigmoid(vec x) { return 1.f / (1.f + exp(-x)); }

// Part of a vector at the end of a row.
static inline vec get(const float* p, int n) { return n == LANES ? load(p) : load_part(p, n); }
static inline void put(float* p, vec v, int n) {
    if (n == LANES) store(p, v);
    else store_part(p, v, n);
}

// Calls body(i, n) for whole vectors of a row, then for the rest. Flattened: a call a vector would cost more than its work.
template <class Body>
__attribute__((flatten, always_inline)) static inline void over(long count, Body body) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) body(i, LANES);
    if (i < count) body(i, (int)(count - i));
}

// The largest of a row; what is not a number is passed over.
static inline float largest(const float* z, long count) {
    vec m[4];
    for (vec& v : m) v = all(-__builtin_inff());
    long j = 0;
    for (; j + 4 * LANES <= count; j += 4 * LANES)
        for (int i = 0; i < 4; i++) m[i] = larger(load(z + j + i * LANES), m[i]);
    for (; j + LANES <= count; j += LANES) m[0] = larger(load(z + j), m[0]);
    float best = largest(larger(larger(m[0], m[1]), larger(m[2], m[3])));
    for (; j < count; j++) best = z[j] > best ? z[j] : best;
    return best;
}
