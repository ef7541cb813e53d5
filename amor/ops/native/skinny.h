// Skinny products: rows of W [outputs, inner] against a few rows of x, at the speed of reading W once.
//
// Every number is one dot product summed in one fixed order, whatever the other rows and the thread count: a row's bits do
// not depend on its neighbours. With 8-bit weights x is rounded to 16 bits a row, sums inside a group are whole numbers and
// exact, and groups are added in order.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "lanes.h"

namespace skinny {

constexpr int GROUP = 64;  // weights that share a scale
constexpr int MOST = 8;    // rows of x

// a b + c with one rounding wherever the machine has it. Left to the compiler, it would fuse in one place and not in
// another, and a row's bits would depend on its neighbours.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

// The sum of all lanes by halves: few steps, and always the same ones.
inline float total(vec v) {
#if defined(__AVX__) && !defined(__AVX512F__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
#endif
}

// Float32 rows: W rows [N x K] against R rows of x; chains = R * N independent sums hide the latency of a multiply-add.
struct Floats {
    const float* w;
    const float* x;
    long inner;

    // rows of W at a time: for one row of x many streams are read, for more the sums need the registers
    static constexpr int together(int R) { return R == 1 ? 8 : R == 4 ? 3 : 4; }

    template <int R, int N>
    inline void dots(long row, long first, float* out, long step) const {
        vec sums[N][R];
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++) sums[n][r] = vec{};
        const float* rows = w + row * inner;
        const float* mine = x + first * inner;
        const auto advance = [&](long j) {
            vec weights[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) weights[n] = load(rows + n * inner + j);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vec xs = load(mine + r * inner + j);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sums[n][r] = fused(weights[n], xs, sums[n][r]);
            }
        };
        long j = 0;
        for (; j + 2 * LANES <= inner; j += 2 * LANES) {
            // for one row of x the processor runs far enough ahead by itself, and was measured to be faster alone
            if constexpr (R > 1) {
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) __builtin_prefetch(rows + (n + 4) * inner + j);  // rows to come: measured
            }
            advance(j);
            advance(j + LANES);
        }
        for (; j + LANES <= inner; j += LANES) advance(j);
        const int left = (int)(inner - j);  // less than a vector: the same lanes, the others 0
        if (left)
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++) {
                    const vec w_left = load_part(rows + n * inner + j, left), x_left = load_part(mine + r * inner + j, left);
                    sums[n][r] = fused(w_left, x_left, sums[n][r]);
                }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) out[r * step + n] = total(sums[n][r]);
    }
};

// 2 LANES numbers of 16 bits; `pairs` multiplies two of them and adds neighbours, exactly, in LANES whole numbers
#if defined(__AVX512BW__)
typedef __m512i halves;
inline halves widened(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline halves loaded(const int16_t* p) { return _mm512_loadu_si512((const void*)p); }
inline ivec pairs(halves a, halves b) { return (ivec)_mm512_madd_epi16(a, b); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
typedef __m256i halves;
inline halves widened(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline halves loaded(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline ivec pairs(halves a, halves b) { return (ivec)_mm256_madd_epi16(a, b); }
#else
struct halves { int16_t at[2 * LANES]; };
inline halves widened(const int8_t* p) { halves v; for (int i = 0; i < 2 * LANES; i++) v.at[i] = p[i]; return v; }
inline halves loaded(const int16_t* p) { halves v; std::memcpy(&v, p, sizeof v); return v; }
inline ivec pairs(const halves& a, const halves& b) {
    ivec v;
    for (int i = 0; i < LANES; i++) v[i] = (int)a.at[2 * i] * b.at[2 * i] + (int)a.at[2 * i + 1] * b.at[2 * i + 1];
    return v;
}
#endif

struct Bytes {
    const int8_t* w;      // [rows, groups * GROUP]
    const float* scales;  // [rows, groups]
    const int16_t* x;     // [R, groups * GROUP]
    const float* units;   // [R] what a whole number of x stands for
    long groups;

    // rows of W at a time: two share a load of x; for one row of x the memory is slower than the sums
    static constexpr int together(int R) { return R == 1 ? 1 : 2; }

    template <int R, int N>
    inline void dots(long row, long first, float* out, long step) const {
        vec sums[N][R];
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++) sums[n][r] = vec{};
        const long inner = groups * GROUP;
        const int8_t* weights = w + row * inner;
        const int16_t* mine = x + first * inner;
        for (long g = 0; g < groups; g++, weights += GROUP, mine += GROUP) {
            ivec totals[N][R];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                __builtin_prefetch(weights + n * inner + AHEAD);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) totals[n][r] = ivec{};
            }
#pragma GCC unroll 2  // all of it unrolled needs more registers than there are
            for (int j = 0; j < GROUP; j += 2 * LANES) {
                halves wide[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) wide[n] = widened(weights + n * inner + j);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const halves xs = loaded(mine + r * inner + j);
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) totals[n][r] += pairs(wide[n], xs);
                }
            }
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const vec scale = all(scales[(row + n) * groups + g]);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) sums[n][r] = fused(__builtin_convertvector(totals[n][r], vec), scale, sums[n][r]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) out[r * step + n] = total(sums[n][r]) * units[first + r];
    }

    static constexpr long AHEAD = 4096;  // bytes: measured
};

// x [rows, inner] to whole numbers of 16 bits and their unit; the tail of the last group is 0
inline void round_rows(const float* x, long rows, long inner, long padded, int16_t* whole, float* units) {
    for (long r = 0; r < rows; r++) {
        const float* mine = x + r * inner;
        float most = 0;
        for (long j = 0; j < inner; j++) most = std::fabs(mine[j]) > most || mine[j] != mine[j] ? std::fabs(mine[j]) : most;
        units[r] = most / 32767.f;
        const float scale = most > 0 ? 32767.f / most : 0.f;
        for (long j = 0; j < inner; j++) whole[r * padded + j] = (int16_t)std::lrintf(mine[j] * scale);
        for (long j = inner; j < padded; j++) whole[r * padded + j] = 0;
    }
}

// Rows of x as 8-bit weights need them.
struct Rounded {
    long groups = 0;
    int16_t* whole = nullptr;  // at a multiple of a cache line: a load across two of them takes twice as long
    std::vector<float> units;
    std::vector<int16_t> room;

    void take(const float* x, long rows, long inner) {
        groups = (inner + GROUP - 1) / GROUP;
        room.resize(rows * groups * GROUP + 32), units.resize(rows);
        whole = (int16_t*)(((uintptr_t)room.data() + 63) & ~(uintptr_t)63);
        round_rows(x, rows, inner, groups * GROUP, whole, units.data());
    }
};

// `count` rows of W, from `row`, against R rows of x: out[r * step + n]
template <int R, class Weights>
inline void block(const Weights& weights, long row, long count, long first, float* out, long step) {
    constexpr int N = Weights::together(R);
    long n = 0;
    for (; n + N <= count; n += N) weights.template dots<R, N>(row + n, first, out + n, step);
    for (; n < count; n++) weights.template dots<R, 1>(row + n, first, out + n, step);
}

template <class Weights>
void panel(const Weights& weights, long row, long count, int rows, float* out, long step) {
    constexpr long CACHED = 24;  // rows of W taken at a time, so that a second batch of x rows finds them in the cache
    for (long n = 0; n < count; n += CACHED) {
        const long here = n + CACHED < count ? CACHED : count - n;
        int first = 0;
        for (; first + 4 <= rows; first += 4) block<4>(weights, row + n, here, first, out + first * step + n, step);
        if (rows - first == 3) block<3>(weights, row + n, here, first, out + first * step + n, step);
        if (rows - first == 2) block<2>(weights, row + n, here, first, out + first * step + n, step);
        if (rows - first == 1) block<1>(weights, row + n, here, first, out + first * step + n, step);
    }
}

// y [rows, outputs] (its rows `step` apart) from W's rows `from` to `to`; add: y += ...
template <class Weights>
void part(const Weights& weights, long from, long to, int rows, float* y, long step, bool add) {
    if (!add) return panel(weights, from, to - from, rows, y + from, step);
    constexpr long PIECE = 48;
    float z[MOST * PIECE];
    for (long n = from; n < to; n += PIECE) {
        const long count = n + PIECE < to ? PIECE : to - n;
        panel(weights, n, count, rows, z, PIECE);
        for (int r = 0; r < rows; r++)
            for (long i = 0; i < count; i++) y[r * step + n + i] += z[r * PIECE + i];
    }
}

// Thread `mine` of `threads` takes rows [from, to) of W: even shares, in eights
struct Share {
    long from, to;

    Share(long outputs, int mine, int threads) {
        const long eights = (outputs + 7) / 8;
        from = eights * mine / threads * 8, to = eights * (mine + 1) / threads * 8;
        if (to > outputs) to = outputs;
        if (from > to) from = to;
    }
};

}  // namespace skinny
