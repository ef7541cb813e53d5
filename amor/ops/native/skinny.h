// Skinny products: rows of W [outputs, inner] against a few rows of x, at the speed of reading W once.
//
// Every number is one dot product summed in one fixed order, whatever the other rows and the thread count: a row's bits do
// not depend on its neighbours. W lies in one of the formats of amor/ops/product/formats.py, named by its tag. A format is one
// struct here: how x is made ready for it, and `block`, some rows of W against up to four rows of x.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"

namespace skinny {

enum Format : long { FLOAT32, FLOAT16, INT8, INT4 };

struct Weights {  // a Matrix of amor/ops/product/matrix.py
    const void *weight, *scales;
    long outputs, inner, format;
};

constexpr int TILE = 16;       // rows of W that a thread's share is a multiple of: of every format whole tiles
constexpr long CACHED = 48;    // rows of W taken at a time, so that more rows of x find them in the cache

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

// A number of 16 bits (IEEE binary16) as a float: exact.
inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t bits;
    float found;
    if (rest >= 0x7c00) bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + 0x38000000);
    else {  // subnormal: a whole number of 2^-24
        found = (float)rest * 5.9604644775390625e-8f;
        return sign ? -found : found;
    }
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

inline vec load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

// Rows of W as they lie in the model, numbers of 32 bits: a dot product a row of W and of x, sums in lanes.
struct Floats {
    static constexpr int AT_ONCE = 4;  // rows of x in one block
    static constexpr int AHEAD = 8;    // rows of W that are fetched ahead: measured
    static constexpr int LINE = 16;    // numbers that come from memory together
    const float *w, *x;
    long inner, x_step;

    // rows of W at a time: for one row of x many streams are read, for more the sums need them, as many as registers hold
    static constexpr int together(int R) { return R == 1 ? 8 : R == 2 || LANES == 16 ? 6 : R == 3 ? 4 : 3; }

    // `count` rows of W, from `row`, against R rows of x from `first` on: out[r * step + n]. cold: W comes from memory
    template <int R>
    void block(long row, long count, long first, float* out, long step, bool cold) const {
        constexpr int N = together(R);
        long n = 0;
        if (cold)
            for (; n + N <= count; n += N) dots<R, N, true>(row + n, first, out + n, step);
        else
            for (; n + N <= count; n += N) dots<R, N, false>(row + n, first, out + n, step);
        for (; n < count; n++) dots<R, 1, false>(row + n, first, out + n, step);
    }

    template <int R, int N, bool COLD>
    inline void dots(long row, long first, float* out, long step) const {
        vec sums[N][R];
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++) sums[n][r] = vec{};
        const float* rows = w + row * inner;
        const float* mine = x + first * x_step;
        const auto advance = [&](long j) {
            vec weights[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) weights[n] = load(rows + n * inner + j);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const vec xs = load(mine + r * x_step + j);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sums[n][r] = fused(weights[n], xs, sums[n][r]);
            }
        };
        long j = 0;
        for (; j + 2 * LANES <= inner; j += 2 * LANES) {
            // for one row of x the processor runs far enough ahead by itself, and was measured to be faster alone
            if constexpr (COLD && R > 1) {
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                    for (int line = 0; line < 2 * LANES; line += LINE) __builtin_prefetch(rows + (n + AHEAD) * inner + j + line);
            }
            advance(j);
            advance(j + LANES);
        }
        for (; j + LANES <= inner; j += LANES) advance(j);
        const int left = (int)(inner - j);  // less than a vector: the same lanes, the others 0
        if (left)
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++) {
                    const vec w_left = load_part(rows + n * inner + j, left), x_left = load_part(mine + r * x_step + j, left);
                    sums[n][r] = fused(w_left, x_left, sums[n][r]);
                }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) out[r * step + n] = sum(sums[n][r]);
    }
};

// 16-bit weights in tiles of 16 rows, [rows / 16][inner][16]: memory is read as it lies, and a number of x meets a whole tile.
// A sum goes over the inner dimension in order, a number at a time.
struct Halves {
    static constexpr int ROWS = 16, AT_ONCE = 6, VECS = ROWS / LANES;
    static constexpr long AHEAD = 1024;  // numbers that are fetched ahead
    const uint16_t* w;
    const float* x;
    long inner, x_step;

    // tiles at a time: as many sums as hide the time one addition takes
    static constexpr int together(int R) { return R == 1 ? 4 : R == 2 ? 3 : R == 3 ? 2 : 1; }

    template <int R>
    void block(long row, long count, long first, float* out, long step, bool) const {
        constexpr int N = together(R);
        long n = 0;
        for (; n + N * ROWS <= count; n += N * ROWS) tiles<R, N>((row + n) / ROWS, count - n, first, out + n, step);
        for (; n < count; n += ROWS) tiles<R, 1>((row + n) / ROWS, count - n, first, out + n, step);
    }

    template <int R, int N>
    inline void tiles(long index, long left, long first, float* out, long step) const {
        vec sums[N][R][VECS];
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < VECS; i++) sums[n][r][i] = vec{};
        const uint16_t* weights = w + index * inner * ROWS;
        const float* mine = x + first * x_step;
        for (long k = 0; k < inner; k++, weights += ROWS) {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                vec here[VECS];
                if (k % 2 == 0) __builtin_prefetch(weights + n * inner * ROWS + AHEAD);
                for (int i = 0; i < VECS; i++) here[i] = load_halves(weights + n * inner * ROWS + i * LANES);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++)
                    for (int i = 0; i < VECS; i++) sums[n][r][i] = fused(here[i], all(mine[r * x_step + k]), sums[n][r][i]);
            }
        }
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < VECS; i++) {
                    const long at = n * ROWS + i * LANES;
                    if (at < left) put(out + r * step + at, sums[n][r][i], (int)(left - at < LANES ? left - at : LANES));
                }
    }
};

// 8-bit weights in tiles of 16 rows: [rows / 16][inner / 2][8][2][2], for two neighbours k of the inner dimension and each
// i < 8 the weights of rows i (plus 128) and i + 8. As one number of 16 bits such a pair is a + 256 b, and
// (a + 256 b) x - 256 (b x) = a x: one shift gives b, and no weight has to be unpacked. Sums may wrap around on the way, and
// are exact in the end. x is rounded to 16 bits a row; sums inside a group of 64 are whole numbers; groups are added in order.
struct Bytes {
    static constexpr int GROUP = 64, ROWS = 16, AT_ONCE = 4;
    static constexpr long AHEAD = 2048;  // bytes: measured
    const int8_t* w;
    const float* scales;   // [rows / ROWS][groups][ROWS]
    const int16_t* x;      // [R, groups * GROUP]
    const int32_t* lifts;  // [R, groups] what adding 128 to a weight adds to a group's sum
    const float* units;    // [R] what a whole number of x stands for
    long groups;

    template <int R>
    void block(long row, long count, long first, float* out, long step, bool) const {
        alignas(64) float sums[R][ROWS];
        for (long n = 0; n < count; n += ROWS) {
            tile<R>((row + n) / ROWS, first, sums);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < ROWS && n + i < count; i++) out[r * step + n + i] = sums[r][i] * units[first + r];
        }
    }

    template <int R>
    __attribute__((noinline)) void tile(long index, long first, float sums[R][ROWS]) const {
        const long inner = groups * GROUP;
        const int8_t* weights = w + index * inner * ROWS;
        std::memset(sums, 0, R * ROWS * sizeof(float));
        for (long g = 0; g < groups; g++, weights += GROUP * ROWS) {
            alignas(64) int32_t totals[R][ROWS];
            const int16_t* mine = x + first * inner + g * GROUP;
            group<R>(weights, mine, inner, lifts + first * groups + g, totals);
            const float* scale = scales + (index * groups + g) * ROWS;
            for (int r = 0; r < R; r++)
                for (int i = 0; i < ROWS; i += LANES) {
                    ivec whole;
                    std::memcpy(&whole, totals[r] + i, sizeof whole);
                    store(sums[r] + i, fused(__builtin_convertvector(whole, vec), load(scale + i), load(sums[r] + i)));
                }
        }
    }

    // whole sums of one group
    template <int R>
    inline void group(const int8_t* weights, const int16_t* mine, long inner, const int32_t* lift, int32_t totals[R][ROWS]) const {
#if defined(__AVX2__)
        __m256i both[R], second[R];
        for (int r = 0; r < R; r++) both[r] = second[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k += 2, weights += 2 * ROWS) {
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
            uint32_t found[ROWS] = {};
            for (int k = 0; k < GROUP; k += 2)
                for (int i = 0; i < 8; i++)
                    for (int j = 0; j < 2; j++) {
                        const int8_t* pair = weights + k * ROWS + 4 * i + 2 * j;
                        const int32_t by = mine[r * inner + k + j];
                        found[i] += (uint32_t)((uint8_t)pair[0] * by), found[i + 8] += (uint32_t)(pair[1] * by);
                    }
            for (int i = 0; i < ROWS; i++) totals[r][i] = (int32_t)(found[i] - (i < 8 ? (uint32_t)lift[r * groups] : 0u));
        }
#endif
    }
};

// 4-bit weights, whole numbers 0 to 15 less 8, in tiles of 8 rows: [rows / 8][groups][4][32] bytes. Of 32 bytes j, byte 4 r + i
// holds the weights of row r at k = 4 j + i (low half) and k = 16 + 4 j + i (high half) of a group of 32. x is rounded to 8 bits
// a group. One instruction multiplies 32 of them and adds pairs: at most 16 products of 15 * 127 meet in a sum of 16 bits, which
// holds them. Groups are added in order, each times its scale (16 bits) and the unit of x.
struct Nibbles {
    static constexpr int GROUP = 32, ROWS = 8, AT_ONCE = 4;
    static constexpr long AHEAD = 1536;  // bytes
    const uint8_t* w;
    const uint16_t* scales;  // [rows / ROWS][groups][ROWS]
    const int8_t* x;         // [R, groups * GROUP]
    const int32_t* lifts;    // [R, groups] 8 times the sum of a group of x
    const float* units;      // [R, groups] what a whole number of x stands for
    long groups;

    template <int R>
    void block(long row, long count, long first, float* out, long step, bool) const {
        alignas(64) float sums[R][ROWS];
        for (long n = 0; n < count; n += ROWS) {
            tile<R>((row + n) / ROWS, first, sums);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < ROWS && n + i < count; i++) out[r * step + n + i] = sums[r][i];
        }
    }

#if defined(__AVX2__)
    template <int R>
    __attribute__((noinline)) void tile(long index, long first, float sums[R][ROWS]) const {
        const uint8_t* weights = w + index * groups * (GROUP / 2 * ROWS);
        const uint16_t* scale = scales + index * groups * ROWS;
        const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        __m256 total[R];
        for (int r = 0; r < R; r++) total[r] = _mm256_setzero_ps();
        for (long g = 0; g < groups; g++, weights += GROUP / 2 * ROWS, scale += ROWS) {
            __m256i found[R];
            for (int r = 0; r < R; r++) found[r] = _mm256_setzero_si256();
            __builtin_prefetch(weights + AHEAD);
            __builtin_prefetch(weights + AHEAD + 64);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const __m256i both = _mm256_loadu_si256((const __m256i*)(weights + 32 * j));
                const __m256i a = _mm256_and_si256(both, low), b = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const int8_t* mine = x + ((first + r) * groups + g) * GROUP + 4 * j;
                    int32_t here, there;
                    std::memcpy(&here, mine, 4), std::memcpy(&there, mine + 16, 4);
                    const __m256i first_half = _mm256_maddubs_epi16(a, _mm256_set1_epi32(here));
                    const __m256i second_half = _mm256_maddubs_epi16(b, _mm256_set1_epi32(there));
                    found[r] = _mm256_add_epi16(found[r], _mm256_add_epi16(first_half, second_half));
                }
            }
            const __m256 steps = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)scale));
            for (int r = 0; r < R; r++) {
                const long at = (first + r) * groups + g;
                const __m256i whole = _mm256_sub_epi32(_mm256_madd_epi16(found[r], ones), _mm256_set1_epi32(lifts[at]));
                total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), _mm256_mul_ps(steps, _mm256_set1_ps(units[at])), total[r]);
            }
        }
        for (int r = 0; r < R; r++) _mm256_store_ps(sums[r], total[r]);
    }
#else
    template <int R>
    __attribute__((noinline)) void tile(long index, long first, float sums[R][ROWS]) const {
        for (int r = 0; r < R; r++)
            for (int i = 0; i < ROWS; i++) {
                float total = 0;
                for (long g = 0; g < groups; g++) {
                    const uint8_t* weights = w + (index * groups + g) * (GROUP / 2 * ROWS);
                    const long at = (first + r) * groups + g;
                    int32_t whole = -lifts[at];
                    for (int k = 0; k < 16; k++) {
                        const uint8_t both = weights[32 * (k / 4) + 4 * i + k % 4];
                        whole += (both & 15) * x[at * GROUP + k] + (both >> 4) * x[at * GROUP + 16 + k];
                    }
                    total = std::fma((float)whole, half_to_float(scales[(index * groups + g) * ROWS + i]) * units[at], total);
                }
                sums[r][i] = total;
            }
    }
#endif
};

inline float largest_size(const float* x, long count) {  // not a number where one is among them
    float most = 0;
    for (long j = 0; j < count; j++) most = std::fabs(x[j]) > most || x[j] != x[j] ? std::fabs(x[j]) : most;
    return most;
}

// `count` numbers of x as whole ones of a narrower type, at most MOST in size; what one of them stands for. The rest is 0.
template <int MOST, class Whole>
inline float round_some(const float* x, long count, long padded, Whole* whole) {
    const float most = largest_size(x, count), scale = most > 0 ? MOST / most : 0.f;
    for (long j = 0; j < count; j++) whole[j] = (Whole)(int)std::nearbyintf(x[j] * scale);
    for (long j = count; j < padded; j++) whole[j] = 0;
    return most / MOST;
}

// Rows of x made ready for a format: as they are, or rounded.
struct Ready {
    const float* x = nullptr;
    long x_step = 0, groups = 0;
    std::vector<int16_t> room;  // of either width
    void* whole = nullptr;      // in it, at a multiple of a cache line: a load across two of them takes twice as long
    std::vector<float> units;
    std::vector<int32_t> lifts;

    void take(const Weights& m, const float* from, long step, long rows) {
        x = from, x_step = step;
        if (m.format == INT8) round_rows<Bytes, 32767, int16_t>(m.inner, rows);
        if (m.format == INT4) round_groups(m.inner, rows);
    }

    template <class Whole>
    Whole* fit(long numbers) {
        room.resize((numbers * sizeof(Whole) + 64) / sizeof(int16_t) + 1);
        whole = (void*)(((uintptr_t)room.data() + 63) & ~(uintptr_t)63);
        return (Whole*)whole;
    }

    template <class Kind, int MOST, class Whole>
    void round_rows(long inner, long rows) {
        groups = (inner + Kind::GROUP - 1) / Kind::GROUP;
        const long padded = groups * Kind::GROUP;
        Whole* to = fit<Whole>(rows * padded);
        units.resize(rows), lifts.assign(rows * groups, 0);
        for (long r = 0; r < rows; r++) units[r] = round_some<MOST>(x + r * x_step, inner, padded, to + r * padded);
        for (long j = 0; j < rows * padded; j++) lifts[j / Kind::GROUP] += 128 * to[j];
    }

    void round_groups(long inner, long rows) {
        constexpr long G = Nibbles::GROUP;
        groups = (inner + G - 1) / G;
        int8_t* to = fit<int8_t>(rows * groups * G);
        units.resize(rows * groups), lifts.resize(rows * groups);
        for (long r = 0; r < rows; r++)
            for (long g = 0; g < groups; g++) {
                const long here = inner - g * G < G ? inner - g * G : G, at = r * groups + g;
                units[at] = round_some<127>(x + r * x_step + g * G, here, G, to + at * G);
                int32_t total = 0;
                for (long j = 0; j < G; j++) total += to[at * G + j];
                lifts[at] = 8 * total;
            }
    }

    // work(kind): the format's struct against all these rows
    template <class Work>
    void against(const Weights& m, Work work) const {
        switch (m.format) {
            case FLOAT32: return work(Floats{(const float*)m.weight, x, m.inner, x_step});
            case FLOAT16: return work(Halves{(const uint16_t*)m.weight, x, m.inner, x_step});
            case INT8:
                return work(Bytes{(const int8_t*)m.weight, (const float*)m.scales, (const int16_t*)whole, lifts.data(), units.data(),
                                  groups});
            case INT4:
                return work(Nibbles{(const uint8_t*)m.weight, (const uint16_t*)m.scales, (const int8_t*)whole, lifts.data(),
                                    units.data(), groups});
        }
    }
};

// Up to CACHED rows of W from `row` on, against all rows of x; the first few of these meet W in memory, the others in the cache.
template <int R, class Kind>
void panel(const Kind& kind, long row, long count, long first, long rows, float* out, long step) {
    for (; first + R <= rows; first += R) kind.template block<R>(row, count, first, out + first * step, step, first == 0);
    if constexpr (R > 1) panel<R - 1>(kind, row, count, first, rows, out, step);
}

template <class Kind>
void panel(const Kind& kind, long row, long count, long rows, float* out, long step) {
    panel<Kind::AT_ONCE>(kind, row, count, 0, rows, out, step);
}

// y [rows, outputs] (its rows `step` apart) from W's rows `from` to `to`; add: y += ...
template <class Kind>
void part(const Kind& kind, long from, long to, long rows, float* y, long step, bool add) {
    static thread_local std::vector<float> held;
    if (add && (long)held.size() < rows * CACHED) held.resize(rows * CACHED);
    for (long n = from; n < to; n += CACHED) {
        const long count = n + CACHED < to ? CACHED : to - n;
        if (!add) {
            panel(kind, n, count, rows, y + n, step);
            continue;
        }
        panel(kind, n, count, rows, held.data(), CACHED);
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < count; i++) y[r * step + n + i] += held[r * CACHED + i];
    }
}

// Thread `mine` of `threads` takes rows [from, to) of W: even shares, in whole tiles
struct Share {
    long from, to;

    Share(long outputs, int mine, int threads) {
        const long tiles = (outputs + TILE - 1) / TILE;
        from = tiles * mine / threads * TILE, to = tiles * (mine + 1) / threads * TILE;
        if (to > outputs) to = outputs;
        if (from > to) from = to;
    }
};

}  // namespace skinny
