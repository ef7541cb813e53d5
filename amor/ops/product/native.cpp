// Skinny products for decode: y = x W^T for a few rows of x, at the speed of reading W once.
//
// Every number of y is one dot product summed in one fixed order, whatever the other rows and the thread count: a row's
// bits do not depend on its neighbours. With 8-bit weights x is rounded to 16 bits a row, sums inside a group are whole
// numbers and exact, and groups are added in order.
#include <cmath>
#include <cstdint>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "lanes.h"

namespace {

constexpr int GROUP = 64;   // weights that share a scale
constexpr long SLAB = 512;  // rows of W a task takes: fixed, so that sums over slabs do not depend on the thread count
constexpr int MOST = 8;     // rows of x




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
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) __builtin_prefetch(rows + (n + N) * inner + j);  // the next N rows
            advance(j);
            advance(j + LANES);
        }
        for (; j + LANES <= inner; j += LANES) advance(j);
        const int left = (int)(inner - j);  // less than a vector: the same lanes, the others 0
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) {
                const vec w_left = load_part(rows + n * inner + j, left), x_left = load_part(mine + r * inner + j, left);
                out[r * step + n] = sum(fused(w_left, x_left, sums[n][r]));
            }
    }
};

#if defined(__AVX2__)
inline vec multiply_add(const int8_t* w, const int16_t* x) {  // sums of GROUP products, in LANES whole numbers
#if defined(__AVX512BW__)
    __m512i total = _mm512_setzero_si512();
    for (int j = 0; j < GROUP; j += 32)
        total = _mm512_add_epi32(total, _mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(w + j))),
                                                          _mm512_loadu_si512((const void*)(x + j))));
    return (vec)_mm512_cvtepi32_ps(total);
#elif defined(__AVX512F__)
    alignas(64) int sums[16] = {};
    for (int j = 0; j < GROUP; j++) sums[(j / 2) % 16] += (int)w[j] * (int)x[j];
    return (vec)_mm512_cvtepi32_ps(_mm512_load_si512(sums));
#else
    __m256i total = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < GROUP; j += 16)
        total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + j))),
                                                          _mm256_loadu_si256((const __m256i*)(x + j))));
    return (vec)_mm256_cvtepi32_ps(total);
#endif
}
#else
inline vec multiply_add(const int8_t* w, const int16_t* x) {
    ivec total{};
    for (int j = 0; j < GROUP; j += LANES)
        for (int i = 0; i < LANES; i++) total[i] += (int)w[j + i] * (int)x[j + i];
    return __builtin_convertvector(total, vec);
}
#endif

struct Bytes {
    const int8_t* w;      // [rows, groups * GROUP]
    const float* scales;  // [rows, groups]
    const int16_t* x;     // [R, groups * GROUP]
    const float* units;   // [R] what a whole number of x stands for
    long groups;

    template <int R, int N>
    inline void dots(long row, long first, float* out, long step) const {
        vec sums[N][R];
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++) sums[n][r] = vec{};
        const long inner = groups * GROUP;
        for (long g = 0; g < groups; g++)
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const int8_t* weights = w + (row + n) * inner + g * GROUP;
                __builtin_prefetch(weights + 2 * N * inner);
                const float scale = scales[(row + n) * groups + g];
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[n][r] = fused(multiply_add(weights, x + (first + r) * inner + g * GROUP), all(scale), sums[n][r]);
            }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) out[r * step + n] = sum(sums[n][r]) * units[first + r];
    }
};

// `count` rows of W, from `row`, against all rows of x: out[r * step + n]
template <int R, int N, class Weights>
inline void block(const Weights& weights, long row, long count, long first, float* out, long step) {
    long n = 0;
    for (; n + N <= count; n += N) weights.template dots<R, N>(row + n, first, out + n, step);
    for (; n < count; n++) weights.template dots<R, 1>(row + n, first, out + n, step);
}

template <class Weights>
void panel(const Weights& weights, long row, long count, int rows, float* out, long step) {
    constexpr long CACHED = 12;  // rows of W taken at a time, so that a second batch of x rows finds them in the cache
    for (long n = 0; n < count; n += CACHED) {
        const long here = n + CACHED < count ? CACHED : count - n;
        int first = 0;
        for (; first + 4 <= rows; first += 4) block<4, 3>(weights, row + n, here, first, out + first * step + n, step);
        if (rows - first == 3) block<3, 4>(weights, row + n, here, first, out + first * step + n, step);
        if (rows - first == 2) block<2, 4>(weights, row + n, here, first, out + first * step + n, step);
        if (rows - first == 1) block<1, 4>(weights, row + n, here, first, out + first * step + n, step);
    }
}

template <class Weights>
void product(const Weights& weights, long outputs, int rows, float* y, long step, int add, int threads) {
    const long tasks = (outputs + 63) / 64;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long task = 0; task < tasks; task++) {
        const long from = task * 64, count = from + 64 < outputs ? 64 : outputs - from;
        float z[MOST * 64];
        panel(weights, from, count, rows, z, 64);
        for (int r = 0; r < rows; r++)
            for (long n = 0; n < count; n++) {
                float& to = y[r * step + from + n];
                to = add ? to + z[r * 64 + n] : z[r * 64 + n];
            }
    }
}

constexpr int FACTS = 8;  // m, sum e, sum e z', sum e z'^2, sum e |residual|^2, best, second, place of the best

void digest(const float* z, long count, long first, const float* residuals, double* facts) {
    const vec least = all(-__builtin_inff());
    vec best = least, next = least;  // of each lane
    ivec place{};
    for (long j = 0; j < count; j += LANES) {
        vec v = least;
        std::memcpy(&v, z + j, (count - j < LANES ? count - j : LANES) * sizeof(float));
        const ivec beaten = v > best;
        const vec lower = choose(beaten, best, v);
        next = choose(lower > next, lower, next);
        place = (beaten & (ivec{} + (int)j)) | (~beaten & place);
        best = choose(beaten, v, best);
    }
    int lane = 0;  // of the largest; of equal ones the first token
    for (int i = 1; i < LANES; i++)
        if (best[i] > best[lane] || (best[i] == best[lane] && place[i] + i < place[lane] + lane)) lane = i;
    const float m = best[lane];
    float second = next[lane];
    for (int i = 0; i < LANES; i++)
        if (i != lane && best[i] > second) second = best[i];
    vec sums[4] = {vec{}, vec{}, vec{}, vec{}};
    for (long j = 0; j < count; j += LANES) {
        vec shifted = all(-1e4f) + m, rest{};
        const int here = count - j < LANES ? (int)(count - j) : LANES;
        std::memcpy(&shifted, z + j, here * sizeof(float));
        if (residuals) rest = load_part(residuals + first + j, here);
        shifted -= m;
        const vec e = exp(shifted), ez = e * shifted;
        sums[0] += e, sums[1] += ez, sums[2] += ez * shifted, sums[3] += e * rest * rest;
    }
    facts[0] = m;
    for (int i = 0; i < 4; i++) facts[1 + i] = sum(sums[i]);
    facts[5] = m, facts[6] = second, facts[7] = (double)(first + place[lane] + lane);
}

void merge(double* a, const double* b) {  // a comes before b
    const double m = a[0] > b[0] ? a[0] : b[0];
    double moved[2][5];
    const double* both[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        const double d = both[i][0] - m, shrink = std::exp(d), *f = both[i];
        moved[i][1] = shrink * f[1];
        moved[i][2] = shrink * (f[2] + d * f[1]);
        moved[i][3] = shrink * (f[3] + 2 * d * f[2] + d * d * f[1]);
        moved[i][4] = shrink * f[4];
    }
    for (int i = 1; i < 5; i++) a[i] = moved[0][i] + moved[1][i];
    a[0] = m;
    if (b[5] > a[5]) a[6] = a[5] > b[6] ? a[5] : b[6], a[5] = b[5], a[7] = b[7];
    else if (b[5] > a[6]) a[6] = b[5];
}

// One pass over W: facts [rows, FACTS] of the logits of every row, and the logits themselves where y is given.
template <class Weights>
void probe(const Weights& weights, long outputs, int rows, float* y, const float* residuals, double* facts, double* room,
           int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long slab = 0; slab < slabs; slab++) {
        const long from = slab * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
        float z[MOST * SLAB];
        panel(weights, from, count, rows, z, SLAB);
        for (int r = 0; r < rows; r++) {
            digest(z + r * SLAB, count, from, residuals, room + (r * slabs + slab) * FACTS);
            if (y) std::memcpy(y + r * outputs + from, z + r * SLAB, count * sizeof(float));
        }
    }
    for (int r = 0; r < rows; r++) {
        double* mine = facts + r * FACTS;
        std::memcpy(mine, room + r * slabs * FACTS, FACTS * sizeof(double));
        for (long slab = 1; slab < slabs; slab++) merge(mine, room + (r * slabs + slab) * FACTS);
    }
}

}  // namespace

// x [rows, inner] to whole numbers of 16 bits and their unit; the tail of the last group is 0
extern "C" void round_rows(const float* x, long rows, long inner, long padded, int16_t* whole, float* units) {
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

struct Rounded {
    long groups;
    std::vector<int16_t> whole;
    std::vector<float> units;

    Rounded(const float* x, long rows, long inner)
        : groups((inner + GROUP - 1) / GROUP), whole(rows * groups * GROUP), units(rows) {
        round_rows(x, rows, inner, groups * GROUP, whole.data(), units.data());
    }
};

// y [rows, outputs], its rows `step` apart; add: y += ...
extern "C" void product_floats(const float* w, long outputs, long inner, const float* x, int rows, float* y, long step, int add,
                               int threads) {
    product(Floats{w, x, inner}, outputs, rows, y, step, add, threads);
}

extern "C" void product_bytes(const int8_t* w, const float* scales, long outputs, long inner, const float* x, int rows, float* y,
                              long step, int add, int threads) {
    const Rounded r(x, rows, inner);
    product(Bytes{w, scales, r.whole.data(), r.units.data(), r.groups}, outputs, rows, y, step, add, threads);
}

extern "C" void probe_floats(const float* w, long outputs, long inner, const float* x, int rows, float* y, double* facts,
                             double* room, int threads) {
    probe(Floats{w, x, inner}, outputs, rows, y, nullptr, facts, room, threads);
}

extern "C" void probe_bytes(const int8_t* w, const float* scales, long outputs, long inner, const float* x, int rows, float* y,
                            const float* residuals, double* facts, double* room, int threads) {
    const Rounded r(x, rows, inner);
    probe(Bytes{w, scales, r.whole.data(), r.units.data(), r.groups}, outputs, rows, y, residuals, facts, room, threads);
}

// The sum of a large array, for measuring how fast memory is read.
extern "C" float stream(const float* data, long count, int threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (long block = 0; block < count / 4096; block++) {
        vec a{}, b{}, c{}, d{};
        const float* p = data + block * 4096;
        for (int j = 0; j < 4096; j += 4 * LANES) {
            __builtin_prefetch(p + j + 1024);
            __builtin_prefetch(p + j + 1024 + 2 * LANES);
            a += load(p + j), b += load(p + j + LANES), c += load(p + j + 2 * LANES), d += load(p + j + 3 * LANES);
        }
        total += sum(a + b + c + d);
    }
    return total;
}
