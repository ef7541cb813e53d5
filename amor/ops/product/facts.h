// Statistics of logits: the facts of a slab of the vocabulary, and how those of slabs are merged.
#pragma once

#include <cmath>
#include <cstring>

#include "skinny.h"

#define INLINE __attribute__((always_inline))  // a call a vector would cost more than its work

namespace facts {

using namespace skinny;

constexpr long SLAB = 512;  // rows of W a task takes: fixed, so that sums over slabs do not depend on the thread count

struct Facts {  // of some logits: the largest m, and sums over them with e = exp(z - m)
    double m, total, first;    // total: e; first: e (z - m)
    double best, next, place;  // the two largest logits, and where the largest is
};

inline Facts digest(const float* z, long count, long first) {
    const vec least = all(-__builtin_inff());
    vec best = least, next = least;  // of each lane
    ivec place{};
    over(count, [&](long j, int here) INLINE {
        vec v = least;
        if (here == LANES) v = load(z + j);
        else std::memcpy(&v, z + j, here * sizeof(float));
        const ivec beaten = v > best;
        const vec lower = choose(beaten, best, v);
        next = choose(lower > next, lower, next);
        place = (beaten & (ivec{} + (int)j)) | (~beaten & place);
        best = choose(beaten, v, best);
    });
    int lane = 0;  // of the largest; of equal ones the first token
    for (int i = 1; i < LANES; i++)
        if (best[i] > best[lane] || (best[i] == best[lane] && place[i] + i < place[lane] + lane)) lane = i;
    const float m = best[lane];
    float second = next[lane];
    for (int i = 0; i < LANES; i++)
        if (i != lane && best[i] > second) second = best[i];
    vec total{}, moment{};
    over(count, [&](long j, int here) INLINE {
        vec shifted = all(-1e4f) + m;
        if (here == LANES) shifted = load(z + j);
        else std::memcpy(&shifted, z + j, here * sizeof(float));
        shifted -= m;
        const vec e = exp(shifted);
        total += e, moment += e * shifted;
    });
    return {m, sum(total), sum(moment), m, second, (double)(first + place[lane] + lane)};
}

// The same sums about another m.
inline Facts about(const Facts& f, double m) {
    const double d = f.m - m, shrink = std::exp(d);
    return {m, shrink * f.total, shrink * (f.first + d * f.total), f.best, f.next, f.place};
}

inline Facts merged(const Facts& one, const Facts& later) {  // the tokens of `one` come first
    const double m = one.m > later.m ? one.m : later.m;
    const Facts a = about(one, m), b = about(later, m);
    Facts both{m, a.total + b.total, a.first + b.first, a.best, a.next, a.place};
    if (b.best > a.best) both.best = b.best, both.place = b.place, both.next = a.best > b.next ? a.best : b.next;
    else if (b.best > a.next) both.next = b.best;
    return both;
}

inline Facts merged(const Facts* slabs, long count) {
    Facts all = slabs[0];
    for (long i = 1; i < count; i++) all = merged(all, slabs[i]);
    return all;
}

// Facts of rows of x, made ready, against rows [from, from + count) of W; their logits are left in z [rows, SLAB].
template <class Kind>
void slab_facts(const Kind& kind, long from, long count, long rows, float* z, Facts* each, long step) {
    for (long n = 0; n < count; n += CACHED)
        panel(kind, from + n, n + CACHED < count ? CACHED : count - n, rows, z + n, SLAB);
    for (long r = 0; r < rows; r++) each[r * step] = digest(z + r * SLAB, count, from);
}

constexpr int STATS = 4;  // numbers given per row

// Entropy, logsumexp and the two best logits.
inline void stats_of(const Facts& f, float* stats, long step) {
    const double log_total = std::log(f.total);
    const double row[STATS] = {log_total - f.first / f.total, f.m + log_total, f.best, f.next};
    for (int i = 0; i < STATS; i++) stats[i * step] = (float)row[i];
}

}  // namespace facts
