// The rotary turn of one head.
#pragma once
#include "lanes.h"

// Each pair (i, i + half) of x by an angle, the other way round with a sign of -1.
static inline void turn_head(const float* x, const float* cos, const float* sin, long half, float sign, float* to) {
    over(half, [&](long i, int n) {
        const vec p = get(x + i, n), q = get(x + half + i, n), c = get(cos + i, n), s = get(sin + i, n) * sign;
        put(to + i, p * c - q * s, n);
        put(to + half + i, q * c + p * s, n);
    });
}
