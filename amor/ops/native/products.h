// Small matrix products out of cache: out = a b or out += a b, with any strides, scaled rows and triangular shapes.
#pragma once
#include "lanes.h"

struct Matrix {  // element (i, j) = p[i * row + j * col]
    const float* p;
    long row, col;
};
static inline Matrix transposed(Matrix m) { return {m.p, m.col, m.row}; }

// which part of a product is needed, when a or out is a square lower triangle
enum Triangle { FULL, LOWER_A, LOWER_A_TRANSPOSED, LOWER_OUT };

constexpr int ROWS = LANES == 16 ? 12 : 6;  // of the block held in registers; its columns are two vectors
constexpr int COLS = 2 * LANES;
constexpr int MAX_INNER = 512;  // the longest inner dimension a panel holds at once

// Keeps a vector in a register: a compiler may choose to load it again for every use, and loads are what is scarce here.
#if defined(__x86_64__)
#define HELD(v) asm("" : "+x"(v))
#else
#define HELD(v)
#endif

// One block of out in registers. The panel holds b as [inner][COLS].
template <int R>
static inline void block(float* out, long ldo, int cols, Matrix a, const float* panel, int from, int to, bool add) {
    vec c[R][2];
    for (int i = 0; i < R; i++) c[i][0] = c[i][1] = vec{};
    const float* pa = a.p + from * a.col;
    const float* pb = panel + from * COLS;
    for (int k = from; k < to; k++, pa += a.col, pb += COLS) {
        vec b0 = load(pb), b1 = load(pb + LANES);
        HELD(b0);
        HELD(b1);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            vec s = all(pa[i * a.row]);
            c[i][0] += s * b0;
            c[i][1] += s * b1;
        }
    }
    for (int i = 0; i < R; i++) {
        float* o = out + i * ldo;
        if (cols == COLS) {
            store(o, add ? load(o) + c[i][0] : c[i][0]);
            store(o + LANES, add ? load(o + LANES) + c[i][1] : c[i][1]);
            continue;
        }
        for (int j = 0; j < cols; j++) o[j] = (add ? o[j] : 0.f) + c[i][j / LANES][j % LANES];
    }
}

template <int R>
static inline void rest(int rows, float* out, long ldo, int cols, Matrix a, const float* panel, int from, int to, bool add) {
    if constexpr (R > 0) {
        if (rows == R) block<R>(out, ldo, cols, a, panel, from, to, add);
        else rest<R - 1>(rows, out, ldo, cols, a, panel, from, to, add);
    }
}

#if defined(__AVX__) && !defined(__AVX512F__)
// eight rows of eight, turned
static inline void turn(vec v[8]) {
    vec a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + j + 2] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        v[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        v[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#endif

// Columns [first, first + cols) of b into a panel [inner][COLS]; missing columns are 0.
static inline void pack(float* panel, Matrix b, int inner, int first, int cols, const float* by_row, const float* by_col) {
    const float* p = b.p + first * b.col;
    int k = 0;
#if defined(__AVX__) && !defined(__AVX512F__)
    if (b.row == 1 && cols == COLS)
        for (; k + 8 <= inner; k += 8)
            for (int half = 0; half < 2; half++) {
                vec v[8];
                for (int j = 0; j < 8; j++) {
                    v[j] = load(p + k + (half * 8 + j) * b.col);
                    if (by_col) v[j] *= by_col[first + half * 8 + j];
                }
                turn(v);
                for (int j = 0; j < 8; j++) store(panel + (k + j) * COLS + half * 8, by_row ? v[j] * by_row[k + j] : v[j]);
            }
#endif
    for (; k < inner; k++) {
        float* to = panel + k * COLS;
        const float* from = p + k * b.row;
        float scale = by_row ? by_row[k] : 1.f;
        if (b.col == 1 && cols == COLS && !by_col) {
            store(to, load(from) * scale);
            store(to + LANES, load(from + LANES) * scale);
            continue;
        }
        for (int j = 0; j < cols; j++) to[j] = from[j * b.col] * scale * (by_col ? by_col[first + j] : 1.f);
        for (int j = cols; j < COLS; j++) to[j] = 0.f;
    }
}

// out [m, n] (rows ldo apart) = or += a [m, inner] times b [inner, n], the rows and columns of b scaled where given.
static inline void product(float* out, long ldo, int m, int n, int inner, Matrix a, Matrix b, bool add, Triangle which = FULL,
                           const float* by_row = nullptr, const float* by_col = nullptr) {
    alignas(64) float panel[MAX_INNER * COLS];
    for (int start = 0; start < inner || start == 0; start += MAX_INNER) {
        const int depth = inner - start < MAX_INNER ? inner - start : MAX_INNER;
        const Matrix a_here{a.p + start * a.col, a.row, a.col}, b_here{b.p + start * b.row, b.row, b.col};
        for (int first = 0; first < n; first += COLS) {
            const int cols = n - first < COLS ? n - first : COLS;
            pack(panel, b_here, depth, first, cols, by_row ? by_row + start : nullptr, by_col);
            for (int i = 0; i < m; i += ROWS) {
                const int rows = m - i < ROWS ? m - i : ROWS;
                int from = 0, to = depth;
                if (which == LOWER_A && to > i + rows - start) to = i + rows - start;
                if (which == LOWER_A_TRANSPOSED && from < i - start) from = i - start;
                if (which == LOWER_OUT && first >= i + rows) continue;
                if (to < from) to = from;
                const Matrix at{a_here.p + i * a.row, a.row, a.col};
                rest<ROWS>(rows, out + i * ldo + first, ldo, cols, at, panel, from, to, add || start);
            }
        }
    }
}
