// One token of the gated delta rule, for one head of one row.
#pragma once
#include <algorithm>

#include "lanes.h"

// Letters as in reference.py. decay[j * decay_step]: the factor (not its logarithm) by which key channel j of the state is kept;
// decay_step 0 is one decay a head, 1 one a channel.
// from [K, V]: the state before, null for none; s: the state after, may be `from` itself; o [V]; u: room for V floats
static inline void delta_token(const float* q, const float* k, const float* v, const float* decay, long decay_step, float beta, long K,
                               long V, const float* from, float* s, float* o, float* u) {
    // a decay that all channels share is taken once, off the sum
    const float shared = decay_step ? 1.f : decay[0];
    std::fill(u, u + V, 0.f);
    for (long j = 0; j < K && from; j++) {
        const float key = decay_step ? k[j] * decay[j] : k[j];
        over(V, [&](long p, int n) { put(u + p, get(u + p, n) + key * get(from + j * V + p, n), n); });
    }
    over(V, [&](long p, int n) { put(u + p, beta * (get(v + p, n) - shared * get(u + p, n)), n); });
    std::fill(o, o + V, 0.f);
    for (long j = 0; j < K; j++) {
        const float keep = decay[j * decay_step];
        over(V, [&](long p, int n) {
            const vec kept = from ? get(from + j * V + p, n) * keep : vec{}, now = kept + k[j] * get(u + p, n);
            put(s + j * V + p, now, n);
            put(o + p, get(o + p, n) + q[j] * now, n);
        });
    }
}
