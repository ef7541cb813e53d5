// Products and probes of the head for decode, on the skinny products of skinny.h.
#include <omp.h>

#include "skinny.h"

#define INLINE __attribute__((always_inline))  // a call a vector would cost more than its work

namespace {

using namespace skinny;

constexpr long SLAB = 512;  // rows of W a task takes: fixed, so that sums over slabs do not depend on the thread count

template <class Weights>
void product(const Weights& weights, long outputs, int rows, float* y, long step, int add, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const Share share(outputs, omp_get_thread_num(), omp_get_num_threads());
        part(weights, share.from, share.to, rows, y, step, add);
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

// One pass over W: facts [rows, FACTS] of the logits of every row, and into y the logits themselves of rows from `first` on.
template <class Weights>
void probe(const Weights& weights, long outputs, int rows, float* y, int first, const float* residuals, double* facts,
           double* room, int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long slab = 0; slab < slabs; slab++) {
        const long from = slab * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
        float z[MOST * SLAB];
        panel(weights, from, count, rows, z, SLAB);
        for (int r = 0; r < rows; r++) {
            digest(z + r * SLAB, count, from, residuals, room + (r * slabs + slab) * FACTS);
            if (r >= first) std::memcpy(y + (r - first) * outputs + from, z + r * SLAB, count * sizeof(float));
        }
    }
    for (int r = 0; r < rows; r++) merge_all(room + r * slabs * FACTS, slabs, facts + r * FACTS);
}

// The tokens of the largest logits, at most `most`: all above a mark, which is set by counting them in steps below the best.
std::vector<long> likeliest(const float* z, long outputs, long most) {
    constexpr int STEPS = 4096;
    constexpr float REACH = 24;  // nats below the best; what lies deeper has no weight in an entropy
    float best = z[0];
    for (long v = 1; v < outputs; v++) best = z[v] > best ? z[v] : best;
    const auto depth = [&](long v) { return (best - z[v]) * (STEPS / REACH); };
    std::vector<long> count(STEPS), found;
    for (long v = 0; v < outputs; v++)
        if (depth(v) < STEPS) count[(long)depth(v)]++;  // not a number is in no step
    long mark = 0, total = 0;
    while (mark < STEPS && total + count[mark] <= most) total += count[mark++];
    found.reserve(total);
    for (long v = 0; v < outputs; v++)
        if (depth(v) < mark) found.push_back(v);
    return found;
}

}  // namespace

extern "C" void round_rows(const float* x, long rows, long inner, long padded, int16_t* whole, float* units) {
    skinny::round_rows(x, rows, inner, padded, whole, units);
}

// y [rows, outputs], its rows `step` apart; add: y += ...
extern "C" void product_floats(const float* w, long outputs, long inner, const float* x, int rows, float* y, long step, int add,
                               int threads) {
    product(Floats{w, x, inner}, outputs, rows, y, step, add, threads);
}

extern "C" void product_bytes(const int8_t* w, const float* scales, long outputs, long inner, const float* x, int rows, float* y,
                              long step, int add, int threads) {
    Rounded r;
    r.take(x, rows, inner);
    product(r.against(w, scales), outputs, rows, y, step, add, threads);
}

extern "C" void probe_floats(const float* w, long outputs, long inner, const float* x, int rows, float* y, int first,
                             double* facts, double* room, int threads) {
    probe(Floats{w, x, inner}, outputs, rows, y, first, nullptr, facts, room, threads);
}

extern "C" void probe_bytes(const int8_t* w, const float* scales, long outputs, long inner, const float* x, int rows, float* y,
                            int first, const float* residuals, double* facts, double* room, int threads) {
    Rounded r;
    r.take(x, rows, inner);
    probe(r.against(w, scales), outputs, rows, y, first, residuals, facts, room, threads);
}

// facts [rows, FACTS] -> told [6, rows]: entropy, logsumexp, the two best logits, spread, residual; and the best token
extern "C" void conclude(const double* facts, long rows, float* told, int64_t* tokens) {
    for (long r = 0; r < rows; r++) {
        const double *f = facts + r * FACTS, mean = f[2] / f[1], log_total = std::log(f[1]);
        const double variance = f[3] / f[1] - mean * mean;
        const double found[6] = {log_total - mean, f[0] + log_total, f[5], f[6], std::sqrt(variance < 0 ? 0 : variance),
                                 std::sqrt(f[4] / f[1])};
        for (int i = 0; i < 6; i++) told[i * rows + r] = (float)found[i];
        tokens[r] = (int64_t)f[7];
    }
}

// z [outputs] 8-bit logits of one row and residuals: those of the likeliest tokens become exact and 0; facts of all of them
extern "C" void refine_row(const float* w, long outputs, long inner, const float* x, long likely, float* z, float* residuals,
                           double* facts, double* room, int threads) {
    const std::vector<long> known = likeliest(z, outputs, likely);
    const long slabs = (outputs + SLAB - 1) / SLAB;
    const Floats weights{w, x, inner};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long i = 0; i < (long)known.size(); i++) {
            weights.dots<1, 1>(known[i], 0, z + known[i], 1);
            residuals[known[i]] = 0;
        }
#pragma omp for schedule(static)
        for (long slab = 0; slab < slabs; slab++) {
            const long from = slab * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
            digest(z + from, count, from, residuals, room + slab * FACTS);
        }
    }
    merge_all(room, slabs, facts);
}

// The token of the largest exact logit of x [inner], where z [outputs] is off by at most length * residuals + slack each;
// of equal ones the first, and not a number counts as largest. How many exact logits it took.
extern "C" long best_row(const float* w, long outputs, long inner, const float* x, const float* z, const float* residuals,
                         float length, float slack, int64_t* token, int threads) {
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
    std::vector<float> exact(among.size());
    const Floats weights{w, x, inner};
#pragma omp parallel for num_threads(threads) schedule(static) if (among.size() > 64)
    for (long i = 0; i < (long)among.size(); i++) weights.dots<1, 1>(among[i], 0, &exact[i], 1);
    long place = 0;
    for (long i = 1; i < (long)among.size(); i++)
        if (exact[i] > exact[place] || (exact[i] != exact[i] && exact[place] == exact[place])) place = i;
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
