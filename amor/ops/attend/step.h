// One query against all keys of its row and head: keys are taken in fixed slabs whose sums are joined in order, so that the
// result does not depend on who computed which.
#pragma once
#include <cmath>

#include "lanes.h"

namespace attention {

constexpr long SLAB = 1024, RUN = 64;  // keys of one slab; keys whose scores are held at once

static inline float dot(const float* a, const float* b, long size) {
    vec total{};
    over(size, [&](long j, int n) __attribute__((always_inline)) { total += get(a + j, n) * get(b + j, n); });
    return sum(total);
}

static inline long slabs(long keys) { return (keys + SLAB - 1) / SLAB; }
static inline long part_size(long size) { return size + 2; }

// part: m, sum of e^(score - m), and `size` sums of e^(score - m) v
static inline void slab(const float* q, const float* k, const float* v, long count, long size, float scale, float* part) {
    float m = -__builtin_inff(), total = 0, *mix = part + 2;
    for (long j = 0; j < size; j++) mix[j] = 0;
    for (long from = 0; from < count; from += RUN) {
        const long here = from + RUN < count ? RUN : count - from;
        alignas(64) float scores[RUN];
        float now = m;
        for (long t = 0; t < here; t++) {
            scores[t] = dot(q, k + (from + t) * size, size) * scale;
            now = scores[t] > now ? scores[t] : now;
        }
        for (long t = here; t < RUN; t++) scores[t] = -1e30f;
        const float shrink = total > 0 ? std::exp(m - now) : 0.f;
        vec sums{};
        for (long t = 0; t < RUN; t += LANES) {
            const vec e = exp(load(scores + t) - now);
            store(scores + t, e);
            sums += e;
        }
        total = total * shrink + sum(sums);
        m = now;
        for (long j = 0; j < size; j++) mix[j] *= shrink;
        for (long t = 0; t < here; t++) {
            const float* value = v + (from + t) * size;
            for (long j = 0; j < size; j++) mix[j] += scores[t] * value[j];
        }
    }
    part[0] = m, part[1] = total;
}

// out [size] of the parts of `count` slabs
static inline void join(const float* parts, long count, long size, float* out) {
    const long width = part_size(size);
    float m = -__builtin_inff(), total = 0;
    for (long s = 0; s < count; s++) m = parts[s * width] > m ? parts[s * width] : m;
    for (long j = 0; j < size; j++) out[j] = 0;
    for (long s = 0; s < count; s++) {
        const float weight = std::exp(parts[s * width] - m);
        total += weight * parts[s * width + 1];
        for (long j = 0; j < size; j++) out[j] += weight * parts[s * width + 2 + j];
    }
    for (long j = 0; j < size; j++) out[j] /= total;
}

}  // namespace attention
