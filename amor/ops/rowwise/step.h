// RMS norm and SwiGLU of one vector.
#pragma once
#include <cmath>

#include "lanes.h"

// y = x / rms(x) * weight, [n] each; y may be x
static inline void norm_row(const float* x, const float* weight, long n, float eps, float* y) {
    vec squares{};
    over(n, [&](long i, int part) { const vec a = get(x + i, part); squares += a * a; });
    const float scale = 1.f / std::sqrt(sum(squares) / n + eps);
    over(n, [&](long i, int part) { put(y + i, get(x + i, part) * scale * get(weight + i, part), part); });
}

// out = silu(gate) * up, at [from, to); out may be either
static inline void swiglu_row(const float* gate, const float* up, long from, long to, float* out) {
    over(to - from, [&](long i, int part) {
        const vec g = get(gate + from + i, part);
        put(out + from + i, g * sigmoid(g) * get(up + from + i, part), part);
    });
}

// weight . silu(x + bias), [n] each
static inline float silu_dot(const float* x, const float* bias, const float* weight, long n) {
    vec total{};
    over(n, [&](long i, int part) {
        const vec a = get(x + i, part) + get(bias + i, part);
        total += a * sigmoid(a) * get(weight + i, part);
    });
    return sum(total);
}
