// One query against all keys of its row, at the speed of reading keys and values once.
// Keys are taken in fixed slabs whose sums are joined in order, so the result does not depend on threads or neighbours.
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"

namespace {

constexpr long SLAB = 1024, RUN = 64;  // keys of one task; keys whose scores are held at once

float dot(const float* a, const float* b, long size) {
    vec total{};
    long j = 0;
    for (; j + LANES <= size; j += LANES) total += load(a + j) * load(b + j);
    if (j < size) total += load_part(a + j, (int)(size - j)) * load_part(b + j, (int)(size - j));
    return sum(total);
}

// part: m, sum of e^(score - m), and `size` sums of e^(score - m) v
void slab(const float* q, const float* k, const float* v, long count, long size, float scale, float* part) {
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

}  // namespace

// q, out [queries, heads, size]; keys of row b, head h begin at k + b * row + h * head; query i sees the first lengths[i]
// of `keys`. Gives 0, or 1 and does nothing where a row or a key is asked for that is not there.
extern "C" int attend(const float* q, const float* k, const float* v, const int64_t* rows, const int64_t* lengths, long queries,
                      long batch, long keys, long heads, long size, long row, long head, float scale, float* out, int threads) {
    long most = 1;
    for (long i = 0; i < queries; i++)
        if (rows[i] < 0 || rows[i] >= batch || lengths[i] < 0 || lengths[i] > keys) return 1;
    for (long i = 0; i < queries; i++) most = lengths[i] > most ? lengths[i] : most;
    const long slabs = (most + SLAB - 1) / SLAB, width = size + 2;
    std::vector<float> parts(queries * heads * slabs * width);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long task = 0; task < queries * heads * slabs; task++) {
        const long i = task / (heads * slabs), h = task / slabs % heads, from = task % slabs * SLAB;
        const long count = lengths[i] - from < SLAB ? lengths[i] - from : SLAB;
        if (count <= 0) continue;
        const long begin = rows[i] * row + h * head + from * size;
        slab(q + (i * heads + h) * size, k + begin, v + begin, count, size, scale, parts.data() + task * width);
    }
    for (long i = 0; i < queries * heads; i++) {
        const long used = (lengths[i / heads] + SLAB - 1) / SLAB;
        const float* mine = parts.data() + i * slabs * width;
        float m = -__builtin_inff(), total = 0, *to = out + i * size;
        for (long s = 0; s < used; s++) m = mine[s * width] > m ? mine[s * width] : m;
        for (long j = 0; j < size; j++) to[j] = 0;
        for (long s = 0; s < used; s++) {
            const float weight = std::exp(mine[s * width] - m);
            total += weight * mine[s * width + 1];
            for (long j = 0; j < size; j++) to[j] += weight * mine[s * width + 2 + j];
        }
        for (long j = 0; j < size; j++) to[j] /= total;
    }
    return 0;
}
