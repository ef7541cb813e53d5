// Products and probes of the head for decode, on the skinny products of skinny.h.
#include <algorithm>

#include "layout.h"
#include "skinny.h"
#include "team.h"

#define INLINE __attribute__((always_inline))  // a call a vector would cost more than its work

struct Lost {  // as in matrix.py: what rounding took from the rows of a head
    const float* residuals;
    double longest, worst, gain;
};

namespace {

using namespace skinny;

constexpr long SLAB = 512;  // rows of W a task takes: fixed, so that sums over slabs do not depend on the thread count

struct Facts {  // of some logits: the largest m, and sums over them with e = exp(z - m)
    double m, total, first, second, residual;  // total: e; first, second: e (z - m) and e (z - m)^2; residual: e |residual|^2
    double best, next, place;                  // the two largest logits, and where the largest is
};

Facts digest(const float* z, long count, long first, const float* residuals) {
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
    vec sums[4] = {vec{}, vec{}, vec{}, vec{}};
    over(count, [&](long j, int here) INLINE {
        vec shifted = all(-1e4f) + m;
        if (here == LANES) shifted = load(z + j);
        else std::memcpy(&shifted, z + j, here * sizeof(float));
        const vec rest = residuals ? get(residuals + first + j, here) : vec{};
        shifted -= m;
        const vec e = exp(shifted), ez = e * shifted;
        sums[0] += e, sums[1] += ez, sums[2] += ez * shifted, sums[3] += e * rest * rest;
    });
    return {m, sum(sums[0]), sum(sums[1]), sum(sums[2]), sum(sums[3]), m, second, (double)(first + place[lane] + lane)};
}

// The same sums about another m.
Facts about(const Facts& f, double m) {
    const double d = f.m - m, shrink = std::exp(d);
    return {m, shrink * f.total, shrink * (f.first + d * f.total), shrink * (f.second + 2 * d * f.first + d * d * f.total),
            shrink * f.residual, f.best, f.next, f.place};
}

Facts merged(const Facts& one, const Facts& later) {  // the tokens of `one` come first
    const double m = one.m > later.m ? one.m : later.m;
    const Facts a = about(one, m), b = about(later, m);
    Facts both{m, a.total + b.total, a.first + b.first, a.second + b.second, a.residual + b.residual, a.best, a.next, a.place};
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
void probe_rows(const Kind& kind, long outputs, long rows, float* y, long first, const float* residuals, Facts* facts, int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
    std::vector<Facts> room(rows * slabs);
    together(threads, [&](Member me) {
        std::vector<float> z(rows * SLAB);
        me.each(slabs, [&](long slab) {
            const long from = slab * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
            for (long n = 0; n < count; n += CACHED)
                panel(kind, from + n, n + CACHED < count ? CACHED : count - n, rows, z.data() + n, SLAB);
            for (long r = 0; r < rows; r++) {
                room[r * slabs + slab] = digest(z.data() + r * SLAB, count, from, residuals);
                if (r >= first) std::memcpy(y + (r - first) * outputs + from, z.data() + r * SLAB, count * sizeof(float));
            }
        });
    });
    for (long r = 0; r < rows; r++) facts[r] = merged(room.data() + r * slabs, slabs);
}

// The tokens of the largest logits: of the `likely` runs of neighbours with the largest ones, all that are as large as the
// least of those. At least `likely` tokens, and hardly more, since few runs hold two.
std::vector<long> likeliest(const float* z, long outputs, long likely) {
    constexpr long RUN = 32;
    const long runs = (outputs + RUN - 1) / RUN;
    std::vector<long> found;
    std::vector<float> tops(runs), order;
    const auto size = [&](long run) { return run + 1 < runs ? RUN : outputs - run * RUN; };
    for (long run = 0; run < runs; run++) tops[run] = largest(z + run * RUN, size(run));
    float mark = -__builtin_inff();
    if (likely < runs) {
        order = tops;
        std::nth_element(order.begin(), order.begin() + likely, order.end(), [](float a, float b) { return a > b; });
        mark = order[likely];
    }
    for (long run = 0; run < runs; run++)
        for (long v = run * RUN; tops[run] > mark && v < run * RUN + size(run); v++)
            if (z[v] > mark) found.push_back(v);
    return found;
}

// How far the entropy of 8-bit logits can be from the exact one: bound.py has the derivation, and the same names.
struct Errors {
    const Lost& lost;
    double length, slack;  // a logit is off by at most length * r_v + slack

    Errors(const Lost& lost, long inner, const float* x) : lost(lost) {
        constexpr double HALF_STEP = 0.5 / 32767, ROUNDING = 1. / (1 << 24);
        double squares = 0, highest = 0;
        for (long j = 0; j < inner; j++) {
            const double v = x[j];
            squares += v * v;
            if (!(std::fabs(v) <= highest)) highest = std::fabs(v);
        }
        const double moved = highest * HALF_STEP * std::sqrt((double)inner), plain = std::sqrt(squares);
        length = plain + moved, slack = lost.longest * (moved + 2 * (inner + 16) * ROUNDING * plain);
    }

    double bound(double entropy, double spread, double residual, const double* weighed) const {
        constexpr double EVALUATION = 1e-5;
        const double most = lost.worst * length + slack;
        const double growth = most > 1e-6 ? std::expm1(2 * most) / (2 * most) : 1 + 2 * most, top = std::exp(2 * most);
        const double mean = residual * length + slack;
        double found = mean * spread * growth + mean * mean * top / 2;
        if (weighed) {
            const double q = std::sqrt(weighed[0]), q0 = std::sqrt(weighed[1]);
            const double together = lost.gain * length * (growth * (q + mean * spread * growth * q0) + most * top * q0) +
                                    slack * (spread * growth + mean * top / 2);
            if (together < found) found = together;
        }
        return found + EVALUATION * (1 + spread + entropy);
    }
};

// sums of (p r (z - mean))^2 and (p r)^2
void weigh(const float* z, const float* residuals, long count, float log_sum, float mean, double* sums) {
    vec q{}, q0{};
    over(count, [&](long j, int n) INLINE {
        const vec v = get(z + j, n), pr = exp(v - log_sum) * get(residuals + j, n), moved = pr * (v - mean);
        q += moved * moved, q0 += pr * pr;
    });
    sums[0] = sum(q), sums[1] = sum(q0);
}

constexpr int STATS = 5;  // numbers told of a row

// What one row's facts come to: told[i * step] entropy, its bound (0: exact), logsumexp and the two best logits; and the best
// token. weighed: where some logits of an 8-bit head are exact.
void conclude(const Facts& f, const Lost* lost, long inner, const float* x, const double* weighed, float* told, long step,
              int64_t* token) {
    const double mean = f.first / f.total, log_total = std::log(f.total), variance = f.second / f.total - mean * mean;
    const double spread = std::sqrt(variance < 0 ? 0 : variance), entropy = log_total - mean, residual = std::sqrt(f.residual / f.total);
    const double bound = lost ? Errors(*lost, inner, x).bound(entropy, spread, residual, weighed) : 0;
    const double found[STATS] = {entropy, bound, f.m + log_total, f.best, f.next};
    for (int i = 0; i < STATS; i++) told[i * step] = (float)found[i];
    *token = (int64_t)f.place;
}

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

// What the head says of x [rows, inner]: told [STATS, rows] and tokens as `conclude` has them, and into y the logits of rows from
// `skipped` on. lost: null where no bound is wanted.
extern "C" void probe(const Weights* head, const Lost* lost, const float* x, long rows, float* y, long skipped, float* told,
                      int64_t* tokens, int threads) {
    Ready ready;
    ready.take(*head, x, head->inner, rows);
    std::vector<Facts> facts(rows);
    ready.against(*head, [&](const auto& kind) {
        probe_rows(kind, head->outputs, rows, y, skipped, lost ? lost->residuals : nullptr, facts.data(), threads);
    });
    for (long r = 0; r < rows; r++) conclude(facts[r], lost, head->inner, x + r * head->inner, nullptr, told + r, rows, tokens + r);
}

// The entropy, in nats, of rows of logits [rows, outputs].
extern "C" void entropies(const float* z, long rows, long outputs, float* entropy, int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
    std::vector<Facts> room(rows * slabs);
    const auto each = [&](long i) {
        const long from = i % slabs * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
        room[i] = digest(z + i / slabs * outputs + from, count, from, nullptr);
    };
    together(threads, [&](Member me) { me.each(rows * slabs, each); });
    for (long r = 0; r < rows; r++) {
        const Facts f = merged(room.data() + r * slabs, slabs);
        entropy[r] = (float)(std::log(f.total) - f.first / f.total);
    }
}

// As `probe` for one row from its 8-bit logits, those of the likeliest tokens made exact and their residuals 0. How many were
// looked at.
extern "C" long refine_row(const Weights* exact, const Lost* lost, const float* x, long likely, const float* logits, float* told,
                           long step, int64_t* token, int threads) {
    const long outputs = exact->outputs, slabs = (outputs + SLAB - 1) / SLAB;
    static thread_local std::vector<float> held;  // memory that is asked for anew comes page by page, which takes longer than all else
    held.resize(2 * outputs);
    float *z = held.data(), *residuals = z + outputs;
    std::memcpy(z, logits, outputs * sizeof(float));
    std::memcpy(residuals, lost->residuals, outputs * sizeof(float));
    const std::vector<long> known = likeliest(z, outputs, likely);
    const Floats weights{(const float*)exact->weight, x, exact->inner, exact->inner};
    std::vector<Facts> room(slabs);
    std::vector<double> sums(2 * slabs);
    const auto size = [&](long slab) { return slab * SLAB + SLAB < outputs ? SLAB : outputs - slab * SLAB; };
    together(threads, [&](Member me) {
        me.each((long)known.size(), [&](long i) {
            weights.dots<1, 1, true>(known[i], 0, z + known[i], 1);
            residuals[known[i]] = 0;
        });
        me.wait();
        me.each(slabs, [&](long slab) { room[slab] = digest(z + slab * SLAB, size(slab), slab * SLAB, residuals); });
    });
    const Facts facts = merged(room.data(), slabs);
    const float mean = (float)(facts.m + facts.first / facts.total), log_sum = (float)(facts.m + std::log(facts.total));
    together(threads, [&](Member me) {
        me.each(slabs, [&](long slab) { weigh(z + slab * SLAB, residuals + slab * SLAB, size(slab), log_sum, mean, &sums[2 * slab]); });
    });
    double weighed[2] = {};
    for (long slab = 0; slab < slabs; slab++) weighed[0] += sums[2 * slab], weighed[1] += sums[2 * slab + 1];
    conclude(facts, lost, exact->inner, x, weighed, told, step, token);
    return (long)known.size();
}

// The token of the largest exact logit of x [inner], where z [outputs] are 8-bit ones; of equal ones the first, and not a number
// counts as largest. How many exact logits it took.
extern "C" long best_row(const Weights* exact, const Lost* lost, const float* x, const float* z, int64_t* token, int threads) {
    const Errors errors(*lost, exact->inner, x);
    const float length = (float)errors.length, slack = (float)errors.slack, *residuals = lost->residuals;
    const long outputs = exact->outputs;
    vec most = all(-__builtin_inff());
    over(outputs, [&](long v, int n) INLINE {
        vec low = most;
        const vec here = get(z + v, n) - (get(residuals + v, n) * length + slack);
        std::memcpy(&low, &here, n * sizeof(float));
        most = larger(low, most);
    });
    const float least = largest(most);
    std::vector<long> among;
    constexpr long RUN = 8 * LANES;  // looked at together: hardly any run holds a token that is left
    for (long from = 0; from < outputs; from += RUN) {
        const long to = from + RUN < outputs ? from + RUN : outputs;
        ivec left{};
        over(to - from, [&](long v, int n) INLINE {
            const vec high = get(z + from + v, n) + (get(residuals + from + v, n) * length + slack);
            left |= ~(high < least);
        });
        int some = 0;
        for (int i = 0; i < LANES; i++) some |= left[i];
        for (long v = from; v < to && some; v++)
            if (!(z[v] + (residuals[v] * length + slack) < least)) among.push_back(v);
    }
    std::vector<float> found(among.size());
    const Floats weights{(const float*)exact->weight, x, exact->inner, exact->inner};
    together(among.size() > 64 ? threads : 1, [&](Member me) {
        me.each((long)among.size(), [&](long i) { weights.dots<1, 1, true>(among[i], 0, &found[i], 1); });
    });
    long place = 0;
    for (long i = 1; i < (long)among.size(); i++)
        if (found[i] > found[place] || (found[i] != found[i] && found[place] == found[place])) place = i;
    *token = among[place];
    return (long)among.size();
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
       STRUCT(Lost, residuals, longest, worst, gain)
       NUMBER(TILE, TILE)
       NUMBER(STATS, STATS)
       NUMBER(float32, FLOAT32)
       NUMBER(float16, FLOAT16)
       NUMBER(int8, INT8)
       NUMBER(int4, INT4)
       NUMBER(int8_group, Bytes::GROUP)
       NUMBER(int4_group, Nibbles::GROUP))
