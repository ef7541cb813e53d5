// Skinny products: rows of W [outputs, inner] against a few rows of x, at the speed of reading W once.
//
// Every number is one dot product summed in one fixed order, whatever the other rows and the thread count: a row's bits do
// not depend on its neighbours. With 8-bit weights x is rounded to 16 bits a row, sums inside a group are whole numbers and
// exact, and groups are added in order.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

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

// Float32 rows: W rows [N x K] against R rows of x; chains = R * N independent sums hide the latency of a multiply-add.
struct Floats {
    const float* w;
    const float* x;
    long inner;

    // rows of W at a time: for one row of x many streams are read, for more the sums need the registers
    static constexpr int together(int R) { return R == 1 ? 8 : R == 2 ? 6 : R == 3 ? 4 : 3; }

    // `count` rows of W, from `row`, against R rows of x: out[r * step + n]
    template <int R>
    inline void block(long row, long count, long first, float* out, long step) const {
        constexpr int N = together(R);
        long n = 0;
        for (; n + N <= count; n += N) dots<R, N>(row + n, first, out + n, step);
        for (; n < count; n++) dots<R, 1>(row + n, first, out + n, step);
    }

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
                for (int n = 0; n < N; n++) __builtin_prefetch(rows + (n + 8) * inner + j);  // measured
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
            for (int n = 0; n < N; n++) out[r * step + n] = sum(sums[n][r]);
    }
};

// 8-bit weights in tiles of 16 rows: [rows / TILE][inner / 2][8][2][2], for two neighbours k of the inner dimension and each
// i < 8 the weights of rows i (plus 128) and i + 8. As one number of 16 bits such a pair is 256 times the second plus the
// first, so its product with x, less 256 times that of the second alone, is the first's: no weight has to be unpacked but by
// one shift. Sums may wrap around on the way, and are exact in the end.
struct Bytes {
    const int8_t* w;
    const float* scales;   // [rows / TILE][groups][TILE]
    const int16_t* x;      // [R, groups * GROUP]
    const int32_t* lifts;  // [R, groups] what adding 128 to a weight adds to a group's sum
    const float* units;    // [R] what a whole number of x stands for
    long groups;

    static constexpr int TILE = 16;
    static constexpr long AHEAD = 2048;  // bytes: measured

    // `count` rows of W, from `row`, a multiple of TILE
    template <int R>
    inline void block(long row, long count, long first, float* out, long step) const {
        alignas(64) float sums[R][TILE];
        for (long n = 0; n < count; n += TILE) {
            const long index = (row + n) / TILE;
            tile<R>(index, first, sums);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < TILE && n + i < count; i++) out[r * step + n + i] = sums[r][i] * units[first + r];
        }
    }

    template <int R>
    __attribute__((noinline)) void tile(long index, long first, float sums[R][TILE]) const {
        const long inner = groups * GROUP;
        const int8_t* weights = w + index * inner * TILE;
        std::memset(sums, 0, R * TILE * sizeof(float));
        for (long g = 0; g < groups; g++, weights += GROUP * TILE) {
            alignas(64) int32_t totals[R][TILE];
            const int16_t* mine = x + first * inner + g * GROUP;
            group<R>(weights, mine, inner, lifts + first * groups + g, totals);
            const float* scale = scales + (index * groups + g) * TILE;
            for (int r = 0; r < R; r++)
                for (int i = 0; i < TILE; i += LANES) {
                    ivec whole;
                    std::memcpy(&whole, totals[r] + i, sizeof whole);
                    store(sums[r] + i, fused(__builtin_convertvector(whole, vec), load(scale + i), load(sums[r] + i)));
                }
        }
    }

    // whole sums of one group
    template <int R>
    inline void group(const int8_t* weights, const int16_t* mine, long inner, const int32_t* lift, int32_t totals[R][TILE]) const {
#if defined(__AVX2__)
        __m256i both[R], second[R];
        for (int r = 0; r < R; r++) both[r] = second[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k += 2, weights += 2 * TILE) {
            if (k % 4 == 0) __builtin_prefetch(weights + AHEAD);
            const __m256i pair = _mm256_loadu_si256((const __m256i*)weights), shifted = _mm256_srai_epi16(pair, 8);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                int32_t two;
                std::memcpy(&two, mine + r * inner + k, sizeof two);
                const __m256i xs = _mm256_set1_epi32(two);
                both[r] = _mm256_add_epi32(both[r], _mm256_madd_epi16(pair, xs));
                second[r] = _mm256_add_epi32(second[r], _mm256_madd_epi16(shifted, xs));
                // sums of four rows fill the registers: left to order them, the compiler would put some in memory
                if constexpr (R == 4) asm("" : "+x"(both[r]), "+x"(second[r]));
            }
        }
        for (int r = 0; r < R; r++) {
            const __m256i raised = _mm256_sub_epi32(both[r], _mm256_slli_epi32(second[r], 8));
            _mm256_store_si256((__m256i*)totals[r], _mm256_sub_epi32(raised, _mm256_set1_epi32(lift[r * groups])));
            _mm256_store_si256((__m256i*)(totals[r] + 8), second[r]);
        }
#else
        for (int r = 0; r < R; r++) {
            uint32_t found[TILE] = {};
            for (int k = 0; k < GROUP; k += 2)
                for (int i = 0; i < 8; i++)
                    for (int j = 0; j < 2; j++) {
                        const int8_t* pair = weights + k * TILE + 4 * i + 2 * j;
                        const int32_t by = mine[r * inner + k + j];
                        found[i] += (uint32_t)((uint8_t)pair[0] * by), found[i + 8] += (uint32_t)(pair[1] * by);
                    }
            for (int i = 0; i < TILE; i++) totals[r][i] = (int32_t)(found[i] - (i < 8 ? (uint32_t)lift[r * groups] : 0u));
        }
#endif
    }
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
    std::vector<int32_t> lifts;
    std::vector<int16_t> room;

    void take(const float* x, long rows, long inner) {
        groups = (inner + GROUP - 1) / GROUP;
        room.resize(rows * groups * GROUP + 32), units.resize(rows), lifts.assign(rows * groups, 0);
        whole = (int16_t*)(((uintptr_t)room.data() + 63) & ~(uintptr_t)63);
        round_rows(x, rows, inner, groups * GROUP, whole, units.data());
        for (long j = 0; j < rows * groups * GROUP; j++) lifts[j / GROUP] += 128 * whole[j];
    }

    // 8-bit weights against the rows of x from `first` on
    Bytes against(const void* w, const float* scales, long first = 0) const {
        return {(const int8_t*)w, scales, whole + first * groups * GROUP, lifts.data() + first * groups, units.data() + first, groups};
    }
};

template <class Weights>
void panel(const Weights& weights, long row, long count, int rows, float* out, long step) {
    constexpr long CACHED = 48;  // rows of W taken at a time, so that a second batch of x rows finds them in the cache
    for (long n = 0; n < count; n += CACHED) {
        const long here = n + CACHED < count ? CACHED : count - n;
        int first = 0;
        for (; first + 4 <= rows; first += 4) weights.template block<4>(row + n, here, first, out + first * step + n, step);
        if (rows - first == 3) weights.template block<3>(row + n, here, first, out + first * step + n, step);
        if (rows - first == 2) weights.template block<2>(row + n, here, first, out + first * step + n, step);
        if (rows - first == 1) weights.template block<1>(row + n, here, first, out + first * step + n, step);
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

// Thread `mine` of `threads` takes rows [from, to) of W: even shares, in whole tiles
struct Share {
    long from, to;

    Share(long outputs, int mine, int threads) {
        const long tiles = (outputs + Bytes::TILE - 1) / Bytes::TILE;
        from = tiles * mine / threads * Bytes::TILE, to = tiles * (mine + 1) / threads * Bytes::TILE;
        if (to > outputs) to = outputs;
        if (from > to) from = to;
    }
};

}  // namespace skinny
