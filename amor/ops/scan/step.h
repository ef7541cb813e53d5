// One token of the Mamba2 recurrence, for one head of one row.
#pragma once
#include "lanes.h"

// Letters as in reference.py. decay: exp(dt A); D: 0 for no skip
// from [P, S]: the state before, null for none; now: the state after, may be `from` itself; y [P]
static inline void scan_token(const float* x, float dt, float decay, const float* B, const float* C, float D, long P, long S,
                              const float* from, float* now, float* y) {
    for (long p = 0; p < P; p++, now += S) {
        const float fed = dt * x[p];
        vec readout{};
        over(S, [&](long j, int n) {
            const vec kept = from ? get(from + p * S + j, n) * decay : vec{}, v = kept + fed * get(B + j, n);
            put(now + j, v, n);
            readout += v * get(C + j, n);
        });
        y[p] = sum(readout) + D * x[p];
    }
}
