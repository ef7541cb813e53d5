// Products and probes of the head for decode, on the skinny products of skinny.h.
#include <omp.h>

#include <algorithm>

#include "skinny.h"

#define INLINE __attribute__((always_inline))  // a call a vector would cost more than its work

struct Matrix {  // as in matrix.py: float32 where there are no scales
    const void* weight;
    const float *scales, *residuals;
    long outputs, inner;
    double longest, worst, gain;
};

namespace {

using namespace skinny;

constexpr long SLAB = 512;  // rows of W a task takes: fixed, so that sums over slabs do not depend on the thread count

// work(weights, first, rows) for as many rows of x at a time as one pass over the matrix serves
template <class Work>
void passes(const Matrix& m, const float* x, long rows, Work work) {
    for (long first = 0; first < rows; first += MOST) {
        const int here = (int)(rows - first < MOST ? rows - first : MOST);
        const float* mine = x + first * m.inner;
        if (m.scales) {
            Rounded r;
            r.take(mine, here, m.inner);
            work(r.against(m.weight, m.scales), first, here);
        } else {
            work(Floats{(const float*)m.weight, mine, m.inner}, first, here);
        }
    }
}

constexpr int FACTS = 8;  // m, sum e, sum e z', sum e z'^2, sum e |residual|^2, best, second, place of the best

void digest(const float* z, long count, long first, const float* residuals, double* facts) {
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
    facts[0] = m;
    for (int i = 0; i < 4; i++) facts[1 + i] = sum(sums[i]);
    facts[5] = m, facts[6] = second, facts[7] = (double)(first + place[lane] + lane);
}

void merge(double* a, const double* b) {  // a comes before b
    const double m = a[0] > b[0] ? a[0] : b[0];
    double moved[2][5];
    const double* both[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        const double d = both[i][0] - m, shrink = std::exp(d), *f = both[i];
        moved[i][1] = shrink * f[1];
        moved[i][2] = shrink * (f[2] + d * f[1]);
        moved[i][3] = shrink * (f[3] + 2 * d * f[2] + d * d * f[1]);
        moved[i][4] = shrink * f[4];
    }
    for (int i = 1; i < 5; i++) a[i] = moved[0][i] + moved[1][i];
    a[0] = m;
    if (b[5] > a[5]) a[6] = a[5] > b[6] ? a[5] : b[6], a[5] = b[5], a[7] = b[7];
    else if (b[5] > a[6]) a[6] = b[5];
}

void merge_all(const double* room, long slabs, double* facts) {
    std::memcpy(facts, room, FACTS * sizeof(double));
    for (long slab = 1; slab < slabs; slab++) merge(facts, room + slab * FACTS);
}

// One pass over W for up to MOST rows: facts [rows, FACTS] of their logits, and into y the logits themselves of rows from `first` on.
template <class Weights>
void probe_few(const Weights& weights, long outputs, int rows, float* y, long first, const float* residuals, double* facts,
               int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
    std::vector<double> room(rows * slabs * FACTS);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long slab = 0; slab < slabs; slab++) {
        const long from = slab * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
        float z[MOST * SLAB];
        panel(weights, from, count, rows, z, SLAB);
        for (int r = 0; r < rows; r++) {
            digest(z + r * SLAB, count, from, residuals, room.data() + (r * slabs + slab) * FACTS);
            if (r >= first) std::memcpy(y + (r - first) * outputs + from, z + r * SLAB, count * sizeof(float));
        }
    }
    for (int r = 0; r < rows; r++) merge_all(room.data() + r * slabs * FACTS, slabs, facts + r * FACTS);
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
    const Matrix& copy;
    double length, slack;  // a logit is off by at most length * r_v + slack

    Errors(const Matrix& copy, const float* x) : copy(copy) {
        const long inner = copy.inner;
        constexpr double HALF_STEP = 0.5 / 32767, ROUNDING = 1. / (1 << 24);
        double squares = 0, highest = 0;
        for (long j = 0; j < inner; j++) {
            const double v = x[j];
            squares += v * v;
            if (!(std::fabs(v) <= highest)) highest = std::fabs(v);
        }
        const double moved = highest * HALF_STEP * std::sqrt((double)inner), plain = std::sqrt(squares);
        length = plain + moved, slack = copy.longest * (moved + 2 * (inner + 16) * ROUNDING * plain);
    }

    double bound(double entropy, double spread, double residual, const double* weighed) const {
        constexpr double EVALUATION = 1e-5;
        const double most = copy.worst * length + slack;
        const double growth = most > 1e-6 ? std::expm1(2 * most) / (2 * most) : 1 + 2 * most, top = std::exp(2 * most);
        const double mean = residual * length + slack;
        double found = mean * spread * growth + mean * mean * top / 2;
        if (weighed) {
            const double q = std::sqrt(weighed[0]), q0 = std::sqrt(weighed[1]);
            const double together = copy.gain * length * (growth * (q + mean * spread * growth * q0) + most * top * q0) +
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

// What one row's facts come to: told[i * step] entropy, how far it can be off, logsumexp, the two best logits, spread, residual;
// and the best token. weighed: where some logits of an 8-bit head are exact.
void conclude(const double* f, const Matrix& head, const float* x, const double* weighed, float* told, long step, int64_t* token) {
    const double mean = f[2] / f[1], log_total = std::log(f[1]), variance = f[3] / f[1] - mean * mean;
    const double spread = std::sqrt(variance < 0 ? 0 : variance), entropy = log_total - mean, residual = std::sqrt(f[4] / f[1]);
    const double off = head.residuals ? Errors(head, x).bound(entropy, spread, residual, weighed) : 0;
    const double found[7] = {entropy, off, f[0] + log_total, f[5], f[6], spread, residual};
    for (int i = 0; i < 7; i++) told[i * step] = (float)found[i];
    *token = (int64_t)f[7];
}

}  // namespace

extern "C" void round_rows(const float* x, long rows, long inner, long padded, int16_t* whole, float* units) {
    skinny::round_rows(x, rows, inner, padded, whole, units);
}

// y [rows, outputs], its rows `step` apart; add: y += ...
extern "C" void product(const Matrix* m, const float* x, long rows, float* y, long step, int add, int threads) {
    passes(*m, x, rows, [&](const auto& weights, long first, int here) {
#pragma omp parallel num_threads(threads)
        {
            const Share share(m->outputs, omp_get_thread_num(), omp_get_num_threads());
            part(weights, share.from, share.to, here, y + first * step, step, add);
        }
    });
}

// What the head says of x [rows, inner]: told [7, rows] and tokens as `conclude` has them, and into y the logits of rows from
// `skipped` on.
extern "C" void probe(const Matrix* head, const float* x, long rows, float* y, long skipped, float* told, int64_t* tokens,
                      int threads) {
    passes(*head, x, rows, [&](const auto& weights, long first, int here) {
        double facts[MOST * FACTS];
        const long left = skipped > first ? skipped - first : 0;
        probe_few(weights, head->outputs, here, y + (first + left - skipped) * head->outputs, left, head->residuals, facts, threads);
        for (int r = 0; r < here; r++)
            conclude(facts + r * FACTS, *head, x + (first + r) * head->inner, nullptr, told + first + r, rows, tokens + first + r);
    });
}

// As `probe` for one row from its 8-bit logits, those of the likeliest tokens made exact and their residuals 0. How many were
// looked at.
extern "C" long refine_row(const Matrix* exact, const Matrix* copy, const float* x, long likely, const float* logits, float* told,
                           long step, int64_t* token, int threads) {
    const long outputs = exact->outputs, slabs = (outputs + SLAB - 1) / SLAB;
    static thread_local std::vector<float> held;  // memory that is asked for anew comes page by page, which takes longer than all else
    held.resize(2 * outputs);
    float *z = held.data(), *residuals = z + outputs;
    std::memcpy(z, logits, outputs * sizeof(float));
    std::memcpy(residuals, copy->residuals, outputs * sizeof(float));
    const std::vector<long> known = likeliest(z, outputs, likely);
    const Floats weights{(const float*)exact->weight, x, exact->inner};
    std::vector<double> room(slabs * FACTS);
    const auto each = [&](auto work) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (long slab = 0; slab < slabs; slab++)
            work(slab, slab * SLAB, slab * SLAB + SLAB < outputs ? SLAB : outputs - slab * SLAB);
    };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < (long)known.size(); i++) {
        weights.dots<1, 1>(known[i], 0, z + known[i], 1);
        residuals[known[i]] = 0;
    }
    each([&](long slab, long from, long count) { digest(z + from, count, from, residuals, room.data() + slab * FACTS); });
    double facts[FACTS], weighed[2] = {};
    merge_all(room.data(), slabs, facts);
    const float mean = (float)(facts[0] + facts[2] / facts[1]), log_sum = (float)(facts[0] + std::log(facts[1]));
    each([&](long slab, long from, long count) { weigh(z + from, residuals + from, count, log_sum, mean, room.data() + 2 * slab); });
    for (long slab = 0; slab < slabs; slab++) weighed[0] += room[2 * slab], weighed[1] += room[2 * slab + 1];
    conclude(facts, *copy, x, weighed, told, step, token);
    return (long)known.size();
}

// The token of the largest exact logit of x [inner], where z [outputs] are 8-bit ones; of equal ones the first, and not a number
// counts as largest. How many exact logits it took.
extern "C" long best_row(const Matrix* exact, const Matrix* copy, const float* x, const float* z, int64_t* token, int threads) {
    const Errors errors(*copy, x);
    const float length = (float)errors.length, slack = (float)errors.slack, *residuals = copy->residuals;
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
    const Floats weights{(const float*)exact->weight, x, exact->inner};
#pragma omp parallel for num_threads(threads) schedule(static) if (among.size() > 64)
    for (long i = 0; i < (long)among.size(); i++) weights.dots<1, 1>(among[i], 0, &found[i], 1);
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
