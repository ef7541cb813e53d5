// What is done to a tile of logits after its product, in one or two passes while it is in the cache; and, where nothing
// but sums over the vocabulary is wanted, the product too: no logit leaves the cache.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "products.h"

namespace {

struct Part {  // of some logits
    double m, total, weighted;  // sums of e^(z - m) and (z - m) e^(z - m)
};

// Short runs are summed in float, the runs in double. Exponents are taken to base 2, and m is what its rounded power stands
// for: near the largest logit, and then exact. keep: write e^(z - m) over z.
template <bool KEEP>
Part exponentials(float* z, long count, float largest) {
    constexpr long RUN = 32 * LANES;
    const float most = largest * LOG2_E;
    Part sums{(double)most / LOG2_E, 0, 0};
    for (long from = 0; from < count; from += RUN) {
        const long here = from + RUN < count ? RUN : count - from;
        vec total{}, weighted{};
        over(here, [&](long j, int n) __attribute__((always_inline)) {
            vec power = all(-1e4f);
            const vec mine = get(z + from + j, n) * LOG2_E - most;
            if (n == LANES) power = mine;
            else std::memcpy(&power, &mine, n * sizeof(float));
            const vec e = exp2_falling(power);
            total += e;
            weighted += e * power;
            if (KEEP) put(z + from + j, e, n);
        });
        sums.total += sum(total);
        sums.weighted += sum(weighted);
    }
    sums.weighted /= LOG2_E;
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

struct Sums {  // of one token, so far
    double m, total, weighted;

    // the next `count` logits; their largest is given
    void take(float* z, long count, float largest) {
        const Part here = exponentials<false>(z, count, largest > m ? largest : (float)m);
        if (total > 0) {
            const double moved = m - here.m, shrink = std::exp(moved);
            weighted = shrink * (weighted + moved * total) + here.weighted;
            total = shrink * total + here.total;
        } else {
            total = here.total, weighted = here.weighted;
        }
        m = here.m;
    }
};

}  // namespace

extern "C" void take(float* z, long tokens, long cols, long first, double* m, double* total, double* weighted, long k,
                     float* values, int64_t* ids, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < tokens; i++) {
        float* row = z + i * cols;
        const float mine = largest(row, cols);
        if (k && mine > values[i * k + k - 1]) keep_best(row, cols, first, k, values + i * k, ids + i * k);
        Sums sums{m[i], total[i], weighted[i]};
        sums.take(row, cols, mine);
        m[i] = sums.m, total[i] = sums.total, weighted[i] = sums.weighted;
    }
}

constexpr long SLICE = 512, BLOCK = 96;  // words and tokens of a tile: it stays in the cache of one core
constexpr long DEEP = 512;               // of the inner dimension at a time

// Logsumexp and entropy of x [tokens, width] (rows `step` apart) against w [vocab, width], both dense inside.
// A token's sums run over slices of the vocabulary in order: its bits depend on nothing else.
extern "C" void read(const float* x, long tokens, long step, const float* w, long vocab, long width, float* log_sum,
                     float* entropy, int threads) {
    std::vector<Sums> sums(tokens, Sums{-__builtin_inff(), 0, 0});
    std::vector<float> packed(SLICE * width);  // [depth blocks][panels][depth][COLS]
    const long blocks = (tokens + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> z(BLOCK * SLICE);
        for (long v0 = 0; v0 < vocab; v0 += SLICE) {
            const int words = (int)std::min(SLICE, vocab - v0), panels = (words + COLS - 1) / COLS;
            const long deeps = (width + DEEP - 1) / DEEP;
#pragma omp for schedule(static)
            for (long task = 0; task < deeps * panels; task++) {
                const long k0 = task / panels * DEEP, first = task % panels * COLS;
                const int depth = (int)std::min(DEEP, width - k0);
                const Matrix here{w + v0 * width + k0, 1, width};
                pack(packed.data() + k0 * SLICE + first * depth, here, depth, (int)first, std::min(COLS, words - (int)first), nullptr,
                     nullptr);
            }
#pragma omp for schedule(dynamic, 1)
            for (long block = 0; block < blocks; block++) {
                const long t0 = block * BLOCK;
                const int rows = (int)std::min(BLOCK, tokens - t0);
                for (long k0 = 0; k0 < width; k0 += DEEP) {
                    const int depth = (int)std::min(DEEP, width - k0);
                    for (int first = 0; first < words; first += COLS)
                        for (int i = 0; i < rows; i += ROWS)
                            rest<ROWS>(std::min(ROWS, rows - i), z.data() + i * SLICE + first, SLICE, std::min(COLS, words - first),
                                       Matrix{x + (t0 + i) * step + k0, step, 1}, packed.data() + k0 * SLICE + first * depth, 0, depth, k0 > 0);
                }
                for (int i = 0; i < rows; i++) sums[t0 + i].take(z.data() + i * SLICE, words, largest(z.data() + i * SLICE, words));
            }
        }
    }
    for (long t = 0; t < tokens; t++) {
        const double log_total = std::log(sums[t].total);
        log_sum[t] = (float)(sums[t].m + log_total), entropy[t] = (float)(log_total - sums[t].weighted / sums[t].total);
    }
}

// Whole rows of logits. gradient: z becomes what times scale is target_weight * (softmax - target).
extern "C" void finish(float* z, long tokens, long cols, const int64_t* goal, const float* target_weight, int gradient, float* nll,
                       float* entropy, float* logsumexp, float* scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < tokens; i++) {
        float* row = z + i * cols;
        const float m = largest(row, cols), hit = row[goal[i]];
        const Part sums = gradient ? exponentials<true>(row, cols, m) : exponentials<false>(row, cols, m);
        const double log_total = std::log(sums.total);
        nll[i] = (float)(log_total + (sums.m - (double)hit));
        entropy[i] = (float)(log_total - sums.weighted / sums.total);
        logsumexp[i] = (float)(sums.m + log_total);
        if (!gradient) continue;
        scale[i] = (float)((double)target_weight[i] / sums.total);
        row[goal[i]] -= (float)sums.total;
    }
}
