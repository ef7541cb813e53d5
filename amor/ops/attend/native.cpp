// The queries that fired against the keys before them, forward and backward: a block of queries of one row and head at a time.
// Keys and values are packed once for all blocks; a few queries at a time meet no more keys than one of them sees.
// A row and head belong to one task and its blocks are taken in order, so sums do not depend on threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "layout.h"
#include "products.h"

namespace {

constexpr long FEWEST = 96, MOST = 288;  // queries of a block
constexpr long SCORES = 1 << 16;         // of a block: where rows are short enough, they stay in the cache

struct Work {
    long rows, heads, size;               // size: of a head
    long k_row, k_head, k_token;          // strides of k and its gradient in floats
    long v_row, v_head, v_token;          // strides of v and its gradient
    const int64_t *first, *lengths;       // [rows + 1] where the queries of a row begin; how many keys each query sees
    const float *q, *k, *v;               // q [queries, heads, size]
    float scale;
};

long padded(long n) { return (n + COLS - 1) / COLS * COLS; }

// The columns of b [inner, n], panel after panel of [inner][COLS], for products with few rows of a at a time.
struct Panels {
    std::vector<float> room;
    long inner = 0;

    void take(Matrix b, long inner, long n) {
        this->inner = inner;
        room.resize(padded(n) * inner);
        for (long first = 0; first < n; first += COLS)
            pack(room.data() + first * inner, b, (int)inner, (int)first, (int)std::min((long)COLS, n - first), nullptr, nullptr);
    }
    const float* at(long first) const { return room.data() + first * inner; }
};

// out [rows <= ROWS, n] = or += rows of a times inner numbers [from, to) of the panels
void few(float* out, long ldo, int rows, long n, Matrix a, const Panels& b, long from, long to, bool add) {
    for (long first = 0; first < n; first += COLS)
        rest<ROWS>(rows, out + first, ldo, (int)std::min((long)COLS, n - first), a, b.at(first), (int)from, (int)to, add);
}

// Queries of one row and head, and how far the scores of each reach among the keys.
struct Block {
    long begin, count, ld;     // the first query; from the scores of one to the next
    long reach[MOST / ROWS];  // of ROWS queries: keys that they or any before them see, in whole panels

    Block(const Work& w, long begin, long end) : begin(begin), count(end - begin) {
        long most = 1;
        for (long i = 0; i < count; i++) {
            most = std::max(most, (long)w.lengths[begin + i]);
            reach[i / ROWS] = padded(most);
        }
        ld = padded(most) + COLS;
    }

    // body(i, n, reach) for n <= ROWS queries from i on
    template <class Body>
    void each_few(Body body) const {
        for (long i = 0; i < count; i += ROWS) body(i, (int)std::min((long)ROWS, count - i), reach[i / ROWS]);
    }

    // out (a row a key, `token` apart) = scores turned, times the panels of what queries bring; += for the first `held` keys.
    // How many keys are held now.
    long scatter(float* out, long token, long keys, long size, const float* scores, const Panels& brought, long held) const {
        long from = 0, j = 0;
        for (; j < std::min(keys, ld - COLS); j += ROWS) {
            while (reach[from / ROWS] <= j) from += ROWS;
            const int rows = (int)std::min((long)ROWS, keys - j);
            few(out + j * token, token, rows, size, Matrix{scores + j, 1, ld}, brought, from, count, j < held);
        }
        return std::max(held, std::min(j, keys));
    }
};

// z -> e^(scale z - log_sum) over the keys a query sees, 0 beyond. With log_sum unknown it is found and written, and z is left
// larger than that by their sum, which is given: one number to divide what they weigh by.
template <bool FIND>
float weights(float* z, long seen, long width, float scale, float* log_sum) {
    const float shift = FIND ? largest(z, seen) * scale : *log_sum, power = scale * LOG2_E, most = shift * LOG2_E;
    vec total{};
    over(seen, [&](long j, int n) {
        const vec e = exp2_falling(get(z + j, n) * power - most);
        put(z + j, e, n);
        if (FIND) {
            vec mine{};
            std::memcpy(&mine, &e, n * sizeof(float));
            total += mine;
        }
    });
    std::fill(z + seen, z + width, 0.f);
    if (!FIND) return 1.f;
    const float whole = sum(total);
    *log_sum = shift + std::log(whole);
    return whole;
}

// keys that some query of the row sees
long most_seen(const Work& w, long row) {
    long most = 0;
    for (long i = w.first[row]; i < w.first[row + 1]; i++) most = std::max(most, (long)w.lengths[i]);
    return most;
}

// The queries of a row in blocks of about one size; `seen` keys at most.
template <class Body>
void each_block(const Work& w, long row, long seen, Body body) {
    const long first = w.first[row], queries = w.first[row + 1] - first;
    const long most = std::clamp(SCORES / (seen + 1), FEWEST, MOST), blocks = (queries + most - 1) / most;
    for (long i = 0; i < blocks; i++) body(Block(w, first + queries * i / blocks, first + queries * (i + 1) / blocks));
}

void divide(float* p, long count, float by) {
    over(count, [&](long j, int n) { put(p + j, get(p + j, n) / by, n); });
}

void clear(float* p, long tokens, long token, long size) {
    for (long t = 0; t < tokens; t++) std::fill(p + t * token, p + t * token + size, 0.f);
}

float dot(const float* a, const float* b, long count) {
    vec total{};
    over(count, [&](long j, int n) { total += get(a + j, n) * get(b + j, n); });
    return sum(total);
}

}  // namespace

// out [queries, heads, size], log_sum [queries, heads]
extern "C" void fired_forward(const Work* w, float* out, float* log_sum, int threads) {
    const long step = w->heads * w->size;  // from one query to the next
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scores;
        Panels keys, values;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < w->rows * w->heads; task++) {
            const long row = task / w->heads, head = task % w->heads, size = w->size, seen = most_seen(*w, row);
            keys.take(Matrix{w->k + row * w->k_row + head * w->k_head, 1, w->k_token}, size, seen);
            values.take(Matrix{w->v + row * w->v_row + head * w->v_head, w->v_token, 1}, seen, size);
            each_block(*w, row, seen, [&](const Block& b) {
                scores.resize(ROWS * b.ld);
                b.each_few([&](long i, int n, long reach) {
                    const long query = b.begin + i, at = query * step + head * size;
                    few(scores.data(), b.ld, n, reach, Matrix{w->q + at, step, 1}, keys, 0, size, false);
                    float whole[ROWS];
                    for (int j = 0; j < n; j++)
                        whole[j] = weights<true>(&scores[j * b.ld], w->lengths[query + j], reach, w->scale,
                                                 log_sum + (query + j) * w->heads + head);
                    few(out + at, step, n, size, Matrix{scores.data(), b.ld, 1}, values, 0, std::min(reach, seen), false);
                    for (int j = 0; j < n; j++) divide(out + at + j * step, size, whole[j]);
                });
            });
        }
    }
}

// dq like q; dk, dv with the strides of k, v, of `keys` tokens; out, log_sum as the forward pass gave them
extern "C" void fired_backward(const Work* w, long keys, const float* out, const float* log_sum, const float* dout, float* dq,
                               float* dk, float* dv, int threads) {
    const long step = w->heads * w->size;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> p, s;
        Panels k_turned, v_turned, k_held, asked, heeded;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < w->rows * w->heads; task++) {
            const long row = task / w->heads, head = task % w->heads, size = w->size, seen = most_seen(*w, row);
            float *to_k = dk + row * w->k_row + head * w->k_head, *to_v = dv + row * w->v_row + head * w->v_head;
            long held = 0;  // keys whose gradients have begun
            const Matrix k{w->k + row * w->k_row + head * w->k_head, w->k_token, 1};
            k_held.take(k, seen, size);
            k_turned.take(transposed(k), size, seen);
            v_turned.take(Matrix{w->v + row * w->v_row + head * w->v_head, 1, w->v_token}, size, seen);
            each_block(*w, row, seen, [&](const Block& b) {
                const long first = b.begin * step + head * size;
                asked.take(Matrix{w->q + first, step, 1}, b.count, size);
                heeded.take(Matrix{dout + first, step, 1}, b.count, size);
                p.resize(b.count * b.ld), s.resize(b.count * b.ld);
                b.each_few([&](long i, int n, long reach) {
                    const long query = b.begin + i, at = first + i * step;
                    float *pi = &p[i * b.ld], *si = &s[i * b.ld];
                    few(pi, b.ld, n, reach, Matrix{w->q + at, step, 1}, k_turned, 0, size, false);
                    few(si, b.ld, n, reach, Matrix{dout + at, step, 1}, v_turned, 0, size, false);
                    for (int j = 0; j < n; j++, pi += b.ld, si += b.ld) {
                        float log = log_sum[(query + j) * w->heads + head];
                        weights<false>(pi, w->lengths[query + j], reach + ROWS, w->scale, &log);
                        const float along = dot(out + at + j * step, dout + at + j * step, size);  // what all weights together send back
                        over(reach, [&](long t, int m) { put(si + t, get(pi + t, m) * (get(si + t, m) - along) * w->scale, m); });
                        std::fill(si + reach, si + reach + ROWS, 0.f);
                    }
                    few(dq + at, step, n, size, Matrix{&s[i * b.ld], b.ld, 1}, k_held, 0, std::min(reach, seen), false);
                });
                b.scatter(to_k, w->k_token, seen, size, s.data(), asked, held);
                held = b.scatter(to_v, w->v_token, seen, size, p.data(), heeded, held);
            });
            clear(to_k + held * w->k_token, keys - held, w->k_token, size);
            clear(to_v + held * w->v_token, keys - held, w->v_token, size);
        }
    }
}

LAYOUT(STRUCT(Work, rows, heads, size, k_row, k_head, k_token, v_row, v_head, v_token, first, lengths, q, k, v, scale))
