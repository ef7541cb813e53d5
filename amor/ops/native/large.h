// Large matrix products: panels of b packed once and shared by the threads, blocks of a's rows taken by whoever is free.
// A number of out is summed over the inner dimension in an order that depends on its length alone, never on threads or on
// other rows and columns.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "products.h"

constexpr long DEEP = 512;   // of the inner dimension at a time: a panel of b stays in the first cache
constexpr long TALL = 48;    // rows of a at a time: they stay in the second, and no thread waits long for another
constexpr long WIDE = 1280;  // columns of b packed at once
constexpr int NEAR = 32;     // of the inner dimension packed at a time: its cache lines serve several panels

struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Room = std::unique_ptr<float[], Free>;
static inline Room room(long floats) {  // at the edge of a cache line, or a vector would lie in two
    return Room((float*)std::aligned_alloc(64, (floats * sizeof(float) / 64 + 1) * 64));
}

// Rows of a whose columns are dense, as [rows / ROWS][inner][ROWS]; missing rows are 0.
static inline void pack_turned(float* to, Matrix a, int rows, int inner) {
    for (int k0 = 0; k0 < inner; k0 += NEAR)
        for (int i = 0; i < rows; i += ROWS)
            for (int k = k0; k < std::min(k0 + NEAR, inner); k++) {
                const float* from = a.p + i * a.row + k * a.col;
                float* place = to + (long)i * inner + (long)k * ROWS;
                if (a.row == 1 && i + ROWS <= rows) std::memcpy(place, from, ROWS * sizeof(float));
                else for (int j = 0; j < ROWS; j++) place[j] = i + j < rows ? from[j * a.row] : 0.f;
            }
}

// Rows of a (as pack_turned lays them, or as they are) against all packed columns. Strides the compiler knows are a tenth faster.
template <bool TURNED>
static void strip(float* out, long ldo, int rows, int cols, Matrix a, const float* panels, long deep, int depth, bool add) {
    for (int first = 0; first < cols; first += COLS)
        for (int i = 0; i < rows; i += ROWS) {
            const Matrix at = TURNED ? Matrix{a.p + (long)i * depth, 1, ROWS} : Matrix{a.p + i * a.row, a.row, 1};
            rest<ROWS>(std::min(ROWS, rows - i), out + i * ldo + first, ldo, std::min(COLS, cols - first), at, panels + first * deep,
                       0, depth, add);
        }
}

// out [m, n] (rows ldo apart) = or += a [m, inner] times b [inner, n]
static void multiply(float* out, long ldo, long m, long n, long inner, Matrix a, Matrix b, bool add, int threads) {
    const long pieces = std::max(1L, (inner + DEEP - 1) / DEEP), deep = (inner + pieces - 1) / pieces;
    const long groups = (m + ROWS - 1) / ROWS;
    const long blocks = (m + TALL * threads - 1) / (TALL * threads) * threads;  // as many for every thread, and alike
    auto begin = [&](long block) { return std::min(m, block * groups / blocks * ROWS); };
    const long wide = std::min(WIDE, (n + COLS - 1) / COLS * COLS);
    const Room panels = room(wide * deep);
    const bool turned = a.col != 1;
#pragma omp parallel num_threads(threads)
    {
        const Room mine = room(turned ? (TALL + ROWS) * deep : 0);
        for (long n0 = 0; n0 < n; n0 += wide)
            for (long piece = 0; piece < pieces; piece++) {
                const long k0 = piece * deep;
                const int cols = (int)std::min(wide, n - n0), depth = (int)std::min(deep, inner - k0);
                const Matrix here{b.p + k0 * b.row + n0 * b.col, b.row, b.col};
                const int count = (cols + COLS - 1) / COLS, tiles = (depth + NEAR - 1) / NEAR;
#pragma omp for schedule(static)
                for (int i = 0; i < tiles * count; i++) {  // tile after tile: rows of b are read as they lie
                    const int first = i % count * COLS, k = i / count * NEAR;
                    const Matrix tile{here.p + k * b.row, b.row, b.col};
                    pack(panels.get() + first * deep + k * COLS, tile, std::min(NEAR, depth - k), first, std::min(COLS, cols - first),
                         nullptr, nullptr);
                }
#pragma omp for schedule(dynamic, 1)
                for (long block = 0; block < blocks; block++) {
                    const long i0 = begin(block);
                    const int rows = (int)(begin(block + 1) - i0);
                    const Matrix left{a.p + i0 * a.row + k0 * a.col, a.row, a.col};
                    float* to = out + i0 * ldo + n0;
                    if (!turned) {
                        strip<false>(to, ldo, rows, cols, left, panels.get(), deep, depth, add || piece > 0);
                        continue;
                    }
                    pack_turned(mine.get(), left, rows, depth);
                    strip<true>(to, ldo, rows, cols, {mine.get(), 1, ROWS}, panels.get(), deep, depth, add || piece > 0);
                }
            }
    }
}
