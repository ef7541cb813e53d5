// The queries that fired against the keys before them, forward and backward: a block of queries of one row and head at a time.
// A row and head belong to one task and its blocks are taken in order, so sums do not depend on threads.
#include <cmath>
#include <cstdint>
#include <vector>

#include "products.h"

namespace {

constexpr long BLOCK = 48;  // queries whose scores are held at once

struct Work {
    long rows, heads, size;               // size: of a head
    long k_row, k_head, k_token;          // strides of k and its gradient in floats
    long v_row, v_head, v_token;          // strides of v and its gradient
    const int64_t *first, *lengths;       // [rows + 1] where the queries of a row begin; how many keys each query sees
    const float *q, *k, *v;               // q [queries, heads, size]
    float scale;
};

// One block of queries of one row and head.
struct Block {
    long begin, end, row, head, width;  // width: keys that some query of the block sees
    const float *q, *k, *v;
    long ld;  // from one query to the next

    Block(const Work& w, long row, long head, long begin, long end) : begin(begin), end(end), row(row), head(head), width(1) {
        for (long i = begin; i < end; i++) width = w.lengths[i] > width ? w.lengths[i] : width;
        ld = w.heads * w.size;
        q = w.q + begin * ld + head * w.size;
        k = w.k + row * w.k_row + head * w.k_head;
        v = w.v + row * w.v_row + head * w.v_head;
    }
    int count() const { return (int)(end - begin); }
};

// out [queries, width] = a (queries, ld apart) times the rows of b
void against(float* out, const Block& b, const float* a, const float* keys, long token, long size) {
    product(out, b.width, b.count(), (int)b.width, (int)size, Matrix{a, b.ld, 1}, Matrix{keys, 1, token}, false);
}

// z -> e^(scale z - log_sum) over the keys a query sees, 0 beyond; with log_sum unknown it is found and written
template <bool FIND>
void weights(float* z, long seen, long width, float scale, float* log_sum) {
    float shift = *log_sum;
    if (FIND) {
        shift = -__builtin_inff();
        for (long j = 0; j < seen; j++) shift = z[j] > shift ? z[j] : shift;
        shift *= scale;
    }
    vec total{};
    over(seen, [&](long j, int n) {
        const vec e = exp(get(z + j, n) * scale - shift);
        put(z + j, e, n);
        if (FIND) {
            vec mine{};
            std::memcpy(&mine, &e, n * sizeof(float));
            total += mine;
        }
    });
    for (long j = seen; j < width; j++) z[j] = 0;
    if (!FIND) return;
    const float whole = sum(total), back = 1.f / whole;
    over(seen, [&](long j, int n) { put(z + j, get(z + j, n) * back, n); });
    *log_sum = shift + std::log(whole);
}

template <class Body>
void each_block(const Work& w, long row, long head, Body body) {
    for (long i = w.first[row]; i < w.first[row + 1]; i += BLOCK) {
        const long end = i + BLOCK < w.first[row + 1] ? i + BLOCK : w.first[row + 1];
        body(Block(w, row, head, i, end));
    }
}

void clear(float* p, long tokens, long token, long size) {
    for (long t = 0; t < tokens; t++)
        for (long j = 0; j < size; j++) p[t * token + j] = 0;
}

}  // namespace

// out [queries, heads, size], log_sum [queries, heads]
extern "C" void fired_forward(const Work* w, float* out, float* log_sum, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scores;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < w->rows * w->heads; task++)
            each_block(*w, task / w->heads, task % w->heads, [&](const Block& b) {
                scores.resize(BLOCK * b.width);
                against(scores.data(), b, b.q, b.k, w->k_token, w->size);
                for (long i = b.begin; i < b.end; i++)
                    weights<true>(&scores[(i - b.begin) * b.width], w->lengths[i], b.width, w->scale,
                                  log_sum + i * w->heads + b.head);
                product(out + b.begin * b.ld + b.head * w->size, b.ld, b.count(), (int)w->size, (int)b.width,
                        Matrix{scores.data(), b.width, 1}, Matrix{b.v, w->v_token, 1}, false);
            });
    }
}

// dq like q; dk, dv with the strides of k, v, of `keys` tokens; out, log_sum as the forward pass gave them
extern "C" void fired_backward(const Work* w, long keys, const float* out, const float* log_sum, const float* dout, float* dq,
                               float* dk, float* dv, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> p, s;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < w->rows * w->heads; task++) {
            const long row = task / w->heads, head = task % w->heads, size = w->size;
            float *to_k = dk + row * w->k_row + head * w->k_head, *to_v = dv + row * w->v_row + head * w->v_head;
            clear(to_k, keys, w->k_token, size);
            clear(to_v, keys, w->v_token, size);
            each_block(*w, row, head, [&](const Block& b) {
                p.resize(BLOCK * b.width), s.resize(BLOCK * b.width);
                const long at = b.begin * b.ld + head * size;
                const int count = b.count(), width = (int)b.width;
                against(p.data(), b, b.q, b.k, w->k_token, size);
                against(s.data(), b, dout + at, b.v, w->v_token, size);
                for (long i = 0; i < count; i++) {
                    float *pi = &p[i * b.width], *si = &s[i * b.width], log = log_sum[(b.begin + i) * w->heads + head];
                    const float *oi = out + at + i * b.ld, *gi = dout + at + i * b.ld;
                    weights<false>(pi, w->lengths[b.begin + i], b.width, w->scale, &log);
                    float along = 0;  // what the whole row of weights sends back
                    for (long j = 0; j < size; j++) along += oi[j] * gi[j];
                    over(b.width, [&](long j, int n) { put(si + j, get(pi + j, n) * (get(si + j, n) - along) * w->scale, n); });
                }
                const Matrix P{p.data(), b.width, 1}, S{s.data(), b.width, 1};
                product(dq + at, b.ld, count, (int)size, width, S, Matrix{b.k, w->k_token, 1}, false);
                product(to_k, w->k_token, width, (int)size, count, transposed(S), Matrix{b.q, b.ld, 1}, true);
                product(to_v, w->v_token, width, (int)size, count, transposed(P), Matrix{dout + at, b.ld, 1}, true);
            });
        }
    }
}
