// RMS norm, SwiGLU and the rotary turn, forward and backward: a token at a time, each number read and written once.
#include <algorithm>
#include <cmath>

#include "layout.h"
#include "rowwise/step.h"
#include "turn.h"

extern "C" void norm_forward(const float* x, const float* w, long rows, long n, float eps, float* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) norm_row(x + r * n, w, n, eps, y + r * n);
}

// dw [blocks, n]: partial sums over fixed blocks of rows, so that the sum does not depend on threads
extern "C" void norm_backward(const float* x, const float* w, const float* dy, long rows, long n, long block, float eps, float* dx,
                              float* dw, int threads) {
    const long blocks = (rows + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < blocks; b++) {
        float* sums = dw + b * n;
        std::fill(sums, sums + n, 0.f);
        for (long r = b * block; r < std::min(rows, (b + 1) * block); r++) {
            const float *in = x + r * n, *out = dy + r * n;
            vec squares{}, along{};  // along: sum of (gradient of the normed vector) times the vector
            over(n, [&](long i, int part) {
                const vec a = get(in + i, part);
                squares += a * a;
                along += get(out + i, part) * get(w + i, part) * a;
            });
            const float scale = 1.f / std::sqrt(sum(squares) / n + eps), pull = sum(along) * scale * scale * scale / n;
            over(n, [&](long i, int part) {
                const vec a = get(in + i, part), g = get(out + i, part);
                put(sums + i, get(sums + i, part) + g * a * scale, part);
                put(dx + r * n + i, g * get(w + i, part) * scale - a * pull, part);
            });
        }
    }
}

extern "C" void swiglu_forward(const float* gate, const float* up, long count, float* y, int threads) {
    constexpr long RUN = 64 * LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long from = 0; from < count; from += RUN) swiglu_row(gate, up, from, std::min(from + RUN, count), y);
}

extern "C" void swiglu_backward(const float* gate, const float* up, const float* dy, long count, float* dgate, float* dup,
                                int threads) {
    constexpr long RUN = 64 * LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long from = 0; from < count; from += RUN)
        over(std::min(RUN, count - from), [&](long i, int part) {
            const vec g = get(gate + from + i, part), open = sigmoid(g), out = get(dy + from + i, part);
            put(dgate + from + i, out * get(up + from + i, part) * open * (1.f + g * (1.f - open)), part);
            put(dup + from + i, out * g * open, part);
        });
}

struct Turn {
    long rows, tokens, heads, half;    // half: of a head's size
    long x_row, x_token, x_head;       // strides in floats; the numbers of a head are dense
};

// y [rows, tokens, heads, size] dense; cos, sin [rows, tokens, half] dense; back: turn the other way
extern "C" void rotate(const Turn* d, const float* x, const float* cos, const float* sin, int back, float* y, int threads) {
    const float sign = back ? -1.f : 1.f;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long t = 0; t < d->rows * d->tokens; t++)
        for (long h = 0; h < d->heads; h++) {
            const float* from = x + t / d->tokens * d->x_row + t % d->tokens * d->x_token + h * d->x_head;
            turn_head(from, cos + t * d->half, sin + t * d->half, d->half, sign, y + (t * d->heads + h) * 2 * d->half);
        }
}

LAYOUT(STRUCT(Turn, rows, tokens, heads, half, x_row, x_token, x_head))
