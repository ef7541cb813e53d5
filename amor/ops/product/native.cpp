// Products and probes of the head for decode, on the skinny products of skinny.h.
#include <algorithm>

#include "layout.h"
#include "skinny.h"
#include "team.h"

#define INLINE __attribute__((always_inline))  // a call a vector would cost more than its work

namespace {

using namespace skinny;

constexpr long SLAB = 512;  // rows of W a task takes: fixed, so that sums over slabs do not depend on the thread count

struct Facts {  // of some logits: the largest m, and sums over them with e = exp(z - m)
    double m, total, first;    // total: e; first: e (z - m)
    double best, next, place;  // the two largest logits, and where the largest is
};

Facts digest(const float* z, long count, long first) {
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
Facts about(const Facts& f, double m) {
    const double d = f.m - m, shrink = std::exp(d);
    return {m, shrink * f.total, shrink * (f.first + d * f.total), f.best, f.next, f.place};
}

Facts merged(const Facts& one, const Facts& later) {  // the tokens of `one` come first
    const double m = one.m > later.m ? one.m : later.m;
    const Facts a = about(one, m), b = about(later, m);
    Facts both{m, a.total + b.total, a.first + b.first, a.best, a.next, a.place};
    if (b.best > a.best) both.best = b.best, both.place = b.place, both.next = a.best > b.next ? a.best : b.next;
    else if (b.best > a.next) both.next = b.best;
    return both;
}

Facts merged(const Facts* slabs, long count) {
    Facts all = slabs[0];
    for (long i = 1; i < count; i++) all = merged(all, slabs[i]);
    return all;
}

// One pass over W: facts [rows] of the logits, and into y the logits themselves of rows from `first` on.
template <class Kind>
void probe_rows(const Kind& kind, long outputs, long rows, float* y, long first, Facts* facts, int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
    std::vector<Facts> room(rows * slabs);
    together(threads, [&](Member me) {
        std::vector<float> z(rows * SLAB);
        me.each(slabs, [&](long slab) {
            const long from = slab * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
            for (long n = 0; n < count; n += CACHED)
                panel(kind, from + n, n + CACHED < count ? CACHED : count - n, rows, z.data() + n, SLAB);
            for (long r = 0; r < rows; r++) {
                room[r * slabs + slab] = digest(z.data() + r * SLAB, count, from);
                if (r >= first) std::memcpy(y + (r - first) * outputs + from, z.data() + r * SLAB, count * sizeof(float));
            }
        });
    });
    for (long r = 0; r < rows; r++) facts[r] = merged(room.data() + r * slabs, slabs);
}

constexpr int STATS = 4;  // numbers given per row

}  // namespace

// x rounded as a format rounds it: whole [rows, padded] (int16 or int8), units [rows or rows * groups]. Gives how many units.
extern "C" long rounded(const Weights* m, const float* x, long rows, void* whole, float* units) {
    Ready ready;
    ready.take(*m, x, m->inner, rows);
    const long group = m->format == INT8 ? Bytes::GROUP : Nibbles::GROUP, bytes = m->format == INT8 ? 2 : 1;
    std::memcpy(whole, ready.whole, rows * ready.groups * group * bytes);
    std::memcpy(units, ready.units.data(), ready.units.size() * sizeof(float));
    return (long)ready.units.size();
}

// y [rows, outputs], its rows `step` apart; add: y += ...
extern "C" void product(const Weights* m, const float* x, long rows, float* y, long step, int add, int threads) {
    Ready ready;
    ready.take(*m, x, m->inner, rows);
    ready.against(*m, [&](const auto& kind) {
        together(threads, [&](Member me) {
            const Share share(m->outputs, me.mine, me.of);
            part(kind, share.from, share.to, rows, y, step, add);
        });
    });
}

// One pass over the head for x [rows, inner]: stats [STATS, rows] are entropy, logsumexp and the two best logits, tokens [rows]
// the best tokens, and y the logits of rows from `skipped` on.
extern "C" void probe(const Weights* head, const float* x, long rows, float* y, long skipped, float* stats, int64_t* tokens,
                      int threads) {
    Ready ready;
    ready.take(*head, x, head->inner, rows);
    std::vector<Facts> facts(rows);
    ready.against(*head, [&](const auto& kind) {
        probe_rows(kind, head->outputs, rows, y, skipped, facts.data(), threads);
    });
    for (long r = 0; r < rows; r++) {
        const Facts& f = facts[r];
        const double log_total = std::log(f.total);
        const double row[STATS] = {log_total - f.first / f.total, f.m + log_total, f.best, f.next};
        for (int i = 0; i < STATS; i++) stats[i * rows + r] = (float)row[i];
        tokens[r] = (int64_t)f.place;
    }
}

// The entropy, in nats, of rows of logits [rows, outputs].
extern "C" void entropies(const float* z, long rows, long outputs, float* entropy, int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
    std::vector<Facts> room(rows * slabs);
    const auto each = [&](long i) {
        const long from = i % slabs * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
        room[i] = digest(z + i / slabs * outputs + from, count, from);
    };
    together(threads, [&](Member me) { me.each(rows * slabs, each); });
    for (long r = 0; r < rows; r++) {
        const Facts f = merged(room.data() + r * slabs, slabs);
        entropy[r] = (float)(std::log(f.total) - f.first / f.total);
    }
}

// The sum of a large array, for measuring how fast memory is read.
extern "C" float stream(const float* data, long count, int threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (long block = 0; block < count / 4096; block++) {
        vec a{}, b{}, c{}, d{};
        const float* p = data + block * 4096;
        for (int j = 0; j < 4096; j += 4 * LANES) {
            __builtin_prefetch(p + j + 1024);
            __builtin_prefetch(p + j + 1024 + 2 * LANES);
            a += load(p + j), b += load(p + j + LANES), c += load(p + j + 2 * LANES), d += load(p + j + 3 * LANES);
        }
        total += sum(a + b + c + d);
    }
    return total;
}

LAYOUT(STRUCT(Weights, weight, scales, outputs, inner, format)
       NUMBER(TILE, TILE)
       NUMBER(STATS, STATS)
       NUMBER(float32, FLOAT32)
       NUMBER(float16, FLOAT16)
       NUMBER(int8, INT8)
       NUMBER(int4, INT4)
       NUMBER(int8_group, Bytes::GROUP)
       NUMBER(int4_group, Nibbles::GROUP))
