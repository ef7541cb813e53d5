// RMS norm and a SiLU gate in either order, of one vector.
#pragma once
#include <cmath>

#include "lanes.h"

// x, the gate z, the norm's weight w and y [n]
template <bool GATE_FIRST>
static inline void gated_norm_row(const float* x, const float* z, const float* w, long n, float eps, float* y) {
    vec squares{};
    over(n, [&](long i, int part) {
        const vec a = get(x + i, part), g = get(z + i, part), gated = GATE_FIRST ? a * g * sigmoid(g) : a;
        squares += gated * gated;
        put(y + i, gated, part);
    });
    const float scale = 1.f / std::sqrt(sum(squares) / n + eps);
    over(n, [&](long i, int part) {
        vec out = get(y + i, part) * scale * get(w + i, part);
        if (!GATE_FIRST) {
            const vec g = get(z + i, part);
            out *= g * sigmoid(g);
        }
        put(y + i, out, part);
    });
}
