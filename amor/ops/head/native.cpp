// What is done to a tile of logits after its product, in one or two passes while it is in the cache.
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

float largest(const float* z, long count) {
    vec m = all(-__builtin_inff());
    long j = 0;
    for (; j + LANES <= count; j += LANES) {
        vec v = load(z + j);
        m = choose(v > m, v, m);
    }
    float best = m[0];
    for (int i = 1; i < LANES; i++) best = m[i] > best ? m[i] : best;
    for (; j < count; j++) best = z[j] > best ? z[j] : best;
    return best;
}

struct Pair {
    double total, weighted;  // sums of e^(z - m) and (z - m) e^(z - m)
};

// Short runs are summed in float, the runs in double. keep: write e^(z - m) over z.
template <bool KEEP>
Pair exponentials(float* z, long count, float m) {
    constexpr long RUN = 32 * LANES;
    Pair sums{0, 0};
    for (long from = 0; from < count; from += RUN) {
        long to = from + RUN < count ? from + RUN : count, j = from;
        vec total{}, weighted{};
        for (; j + LANES <= to; j += LANES) {
            vec shifted = load(z + j) - m, e = exp(shifted);
            total += e;
            weighted += e * shifted;
            if (KEEP) store(z + j, e);
        }
        if (j < to) {
            vec shifted = all(-1e4f);
            std::memcpy(&shifted, z + j, (to - j) * sizeof(float));
            for (int i = 0; i < to - j; i++) shifted[i] -= m;
            vec e = exp(shifted);
            total += e;
            weighted += e * shifted;
            if (KEEP) store_part(z + j, e, (int)(to - j));
        }
        sums.total += sum(total);
        sums.weighted += sum(weighted);
    }
    return sums;
}

// The k best logits so far, falling; of equal ones the first token stays ahead.
void keep_best(const float* z, long count, long first, long k, float* values, int64_t* ids) {
    for (long j = 0; j < count; j++) {
        const float v = z[j];
        if (!(v > values[k - 1])) continue;
        long place = k - 1;
        for (; place > 0 && v > values[place - 1]; place--) values[place] = values[place - 1], ids[place] = ids[place - 1];
        values[place] = v;
        ids[place] = first + j;
    }
}

}  // namespace

extern "C" void take(float* z, long tokens, long cols, long first, float* m, double* total, double* weighted, long k,
                     float* values, int64_t* ids, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < tokens; i++) {
        float* row = z + i * cols;
        const float mine = largest(row, cols);
        if (k && mine > values[i * k + k - 1]) keep_best(row, cols, first, k, values + i * k, ids + i * k);
        const float now = mine > m[i] ? mine : m[i];
        const Pair here = exponentials<false>(row, cols, now);
        if (total[i] > 0) {
            const double moved = (double)m[i] - (double)now, shrink = std::exp(moved);
            weighted[i] = shrink * (weighted[i] + moved * total[i]) + here.weighted;
            total[i] = shrink * total[i] + here.total;
        } else {
            total[i] = here.total, weighted[i] = here.weighted;
        }
        m[i] = now;
    }
}

extern "C" void finish(float* z, long tokens, long cols, const int64_t* goal, const float* share, int gradient, float* nll,
                       float* entropy, float* logsumexp, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < tokens; i++) {
        float* row = z + i * cols;
        const float m = largest(row, cols), hit = row[goal[i]];
        const Pair sums = gradient ? exponentials<true>(row, cols, m) : exponentials<false>(row, cols, m);
        const double log_total = std::log(sums.total);
        nll[i] = (float)(log_total + ((double)m - (double)hit));
        entropy[i] = (float)(log_total - sums.weighted / sums.total);
        logsumexp[i] = (float)((double)m + log_total);
        if (!gradient) continue;
        const float scale = (float)((double)share[i] / sums.total);
        long j = 0;
        for (; j + LANES <= cols; j += LANES) store(row + j, load(row + j) * scale);
        for (; j < cols; j++) row[j] *= scale;
        row[goal[i]] -= share[i];
    }
}
