// RMS norm and a SiLU gate in either order, forward and backward, one vector of n numbers at a time.
#include <algorithm>
#include <cmath>

#include "gated_norm/step.h"
#include "lanes.h"
#include "layout.h"

struct Shape {
    long rows, tokens, per_token, n, block;  // vectors: rows * tokens * per_token; block: tokens of one partial sum
    long x_row, x_token, z_row, z_token;     // strides in floats; the vectors of a token are dense
    float eps;
};

template <bool GATE_FIRST>
static void backward(const Shape& d, const float* x, const float* z, const float* w, const float* dy, float* dx, float* dz, float* dw) {
    vec squares{}, along{};  // along: sum of (gradient of the normed vector) times the vector before the norm
    over(d.n, [&](long i, int n) {
        const vec a = get(x + i, n), g = get(z + i, n), gate = g * sigmoid(g), before = GATE_FIRST ? a * gate : a;
        squares += before * before;
        along += get(dy + i, n) * get(w + i, n) * before * (GATE_FIRST ? all(1.f) : gate);
    });
    const float scale = 1.f / std::sqrt(sum(squares) / d.n + d.eps), pull = sum(along) * scale * scale * scale / d.n;
    over(d.n, [&](long i, int n) {
        const vec a = get(x + i, n), g = get(z + i, n), open = sigmoid(g), gate = g * open, slope = open * (1.f + g * (1.f - open));
        const vec out = get(dy + i, n), weight = get(w + i, n), before = GATE_FIRST ? a * gate : a;
        const vec normed = before * scale, into = GATE_FIRST ? out : out * gate;
        const vec back = into * weight * scale - before * pull;  // the gradient before the norm
        put(dw + i, get(dw + i, n) + into * normed, n);
        put(dx + i, GATE_FIRST ? back * gate : back, n);
        put(dz + i, slope * (GATE_FIRST ? back * a : out * normed * weight), n);
    });
}

extern "C" void norm_forward(const Shape* d, int gate_first, const float* x, const float* z, const float* w, float* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < d->rows * d->tokens; i++)
        for (long v = 0; v < d->per_token; v++) {
            const float* xi = x + i / d->tokens * d->x_row + i % d->tokens * d->x_token + v * d->n;
            const float* zi = z + i / d->tokens * d->z_row + i % d->tokens * d->z_token + v * d->n;
            (gate_first ? gated_norm_row<true> : gated_norm_row<false>)(xi, zi, w, d->n, d->eps, y + (i * d->per_token + v) * d->n);
        }
}

// dw [blocks, n]: partial sums over fixed blocks of tokens, so that the sum does not depend on threads
extern "C" void norm_backward(const Shape* d, int gate_first, const float* x, const float* z, const float* w, const float* dy,
                              float* dx, float* dz, float* dw, int threads) {
    const long all = d->rows * d->tokens, blocks = (all + d->block - 1) / d->block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < blocks; b++) {
        std::fill(dw + b * d->n, dw + (b + 1) * d->n, 0.f);
        for (long i = b * d->block; i < std::min(all, (b + 1) * d->block); i++)
            for (long v = 0; v < d->per_token; v++) {
                const float* xi = x + i / d->tokens * d->x_row + i % d->tokens * d->x_token + v * d->n;
                const float* zi = z + i / d->tokens * d->z_row + i % d->tokens * d->z_token + v * d->n;
                const long at = (i * d->per_token + v) * d->n;
                (gate_first ? backward<true> : backward<false>)(*d, xi, zi, w, dy + at, dx + at, dz + at, dw + b * d->n);
            }
    }
}

LAYOUT(STRUCT(Shape, rows, tokens, per_token, n, block, x_row, x_token, z_row, z_token, eps))
