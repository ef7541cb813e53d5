// The gated delta rule in matrix form, forward and backward, one head at a time, chunk by chunk, out of cache.
// Letters as in reference.py. In a chunk, with e[t, s] the decay from behind s to t (never above 1):
//   (1 + L) u = beta (v - since k S)     L[t, s] = beta_t (k_t . k_s) e[t, s], s < t        solved from the top down
//   o = since q S + R u                  R[t, s] = (q_t . k_s) e[t, s], s <= t
//   S' = carry S + (until k)^T u
#include <omp.h>

#include <algorithm>

#include "decays.h"
#include "delta/step.h"
#include "products.h"

struct Shape4 {
    long rows, length, heads, keys, values, chunk;
    long count() const { return (length + chunk - 1) / chunk; }
    int tokens(long n) const { return (int)std::min(chunk, length - n * chunk); }
};

struct Inputs {  // strides count floats; the two inner dimensions of q, k and v are dense
    const float *q, *k, *v, *g, *beta, *state;
    const uint8_t* reset;
    long q_row, q_token, k_row, k_token, v_row, v_token;
};

struct Head {  // one head of one row: where its numbers lie
    const Shape4& d;
    const Inputs& in;
    long row, head;
    long token(long c) const { return (row * d.length + c * d.chunk) * d.heads + head; }
    long started(long c) const { return ((row * d.heads + head) * d.count() + c) * d.keys * d.values; }
    Matrix q(long c) const { return {in.q + row * in.q_row + c * d.chunk * in.q_token + head * d.keys, in.q_token, 1}; }
    Matrix k(long c) const { return {in.k + row * in.k_row + c * d.chunk * in.k_token + head * d.keys, in.k_token, 1}; }
    Matrix v(long c) const { return {in.v + row * in.v_row + c * d.chunk * in.v_token + head * d.values, in.v_token, 1}; }
};

// What both directions need of a chunk: decays, strengths, and the two triangles of pairs with and without their factors.
struct Chunk {
    int n;
    long ld;
    Decays e;
    float beta[MAX_CHUNK];
    float *same, *asked;    // k k^T and q k^T times decay; 0 above the diagonal as far as a block of rows reads
    float *system;          // beta times same, 0 on the diagonal too: the L above

    void prepare(const Head& h, long c, float* room) {
        const Shape4& d = h.d;
        n = d.tokens(c), ld = d.chunk;
        same = room, asked = same + ld * ld, system = asked + ld * ld;
        e.sum_up(h.in.g + h.token(c), d.heads, 1.f, h.in.reset ? h.in.reset + h.row * d.length + c * d.chunk : nullptr, n);
        for (int t = 0; t < n; t++) beta[t] = h.in.beta[h.token(c) + t * d.heads];
        product(same, ld, n, n, d.keys, h.k(c), transposed(h.k(c)), false, LOWER_OUT);
        product(asked, ld, n, n, d.keys, h.q(c), transposed(h.k(c)), false, LOWER_OUT);
        for (int t = 0; t < n; t++) {
            int s = 0;
            for (; s <= t; s += LANES) {
                const vec decay = e.between(t, s);
                const ivec upto = count_up() <= (ivec)(ivec{} + (t - s)), below = count_up() < (ivec)(ivec{} + (t - s));
                const long at = t * ld + s;
                const vec pair = choose(upto, load(same + at) * decay, vec{});
                store(same + at, pair);
                store(asked + at, choose(upto, load(asked + at) * decay, vec{}));
                store(system + at, choose(below, pair * beta[t], vec{}));
            }
            for (; s < t + ROWS && s < ld; s += LANES)
                for (float* m : {same, asked, system}) store(m + t * ld + s, vec{});
        }
    }
};

// x [n, m] <- (1 + L)^-1 x, rows from the top down; blocks of rows by products, a block itself row by row.
static void solve(float* x, long ldx, const float* L, long ld, int n, int m) {
    for (int first = 0; first < n; first += 8) {
        const int rows = std::min(8, n - first);
        float minus[8 * MAX_CHUNK];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < first; j++) minus[i * MAX_CHUNK + j] = -L[(first + i) * ld + j];
        if (first) product(x + first * ldx, ldx, rows, m, first, {minus, MAX_CHUNK, 1}, {x, ldx, 1}, true);
        for (int i = 1; i < rows; i++)
            for (int j = 0; j < i; j++) {
                const float f = L[(first + i) * ld + first + j];
                float *to = x + (first + i) * ldx, *from = x + (first + j) * ldx;
                for (int p = 0; p < m; p++) to[p] -= f * from[p];
            }
    }
}

// x <- (1 + L)^-T x, rows from the bottom up.
static void solve_transposed(float* x, long ldx, const float* L, long ld, int n, int m) {
    for (int first = (n - 1) / 8 * 8; first >= 0; first -= 8) {
        const int rows = std::min(8, n - first), done = first + rows;
        float minus[8 * MAX_CHUNK];
        for (int i = 0; i < rows; i++)
            for (int j = done; j < n; j++) minus[i * MAX_CHUNK + j - done] = -L[j * ld + first + i];
        if (done < n) product(x + first * ldx, ldx, rows, m, n - done, {minus, MAX_CHUNK, 1}, {x + done * ldx, ldx, 1}, true);
        for (int i = rows - 2; i >= 0; i--)
            for (int j = i + 1; j < rows; j++) {
                const float f = L[(first + j) * ld + first + i];
                float *to = x + (first + i) * ldx, *from = x + (first + j) * ldx;
                for (int p = 0; p < m; p++) to[p] -= f * from[p];
            }
    }
}

static void forward_head(const Head& h, float* o, float* solved, float* starts, float* state, float* room) {
    const Shape4& d = h.d;
    const long area = d.keys * d.values, V = d.values, ldo = d.heads * V;
    float *s = state + (h.row * d.heads + h.head) * area, *told = room + 3 * d.chunk * d.chunk, *mine = told + d.chunk * V;
    Chunk chunk;
    if (h.in.state) std::copy_n(h.in.state + (h.row * d.heads + h.head) * area, area, s);
    else std::fill(s, s + area, 0.f);
    for (long c = 0; c < d.count(); c++) {
        chunk.prepare(h, c, room);
        const int n = chunk.n;
        const Matrix S{s, V, 1}, v = h.v(c);
        if (starts) std::copy(s, s + area, starts + h.started(c));
        float* u = solved ? solved + h.token(c) * V : mine;
        const long ldu = solved ? ldo : V;
        product(told, V, n, V, d.keys, h.k(c), S, false);
        for (int t = 0; t < n; t++)
            for (long p = 0; p < V; p++)
                u[t * ldu + p] = chunk.beta[t] * (v.p[t * v.row + p] - chunk.e.since[t] * told[t * V + p]);
        solve(u, ldu, chunk.system, d.chunk, n, (int)V);
        float* out = o + h.token(c) * V;
        product(told, V, n, V, d.keys, h.q(c), S, false);
        for (int t = 0; t < n; t++)
            for (long p = 0; p < V; p++) out[t * ldo + p] = chunk.e.since[t] * told[t * V + p];
        product(out, ldo, n, V, n, {chunk.asked, d.chunk, 1}, {u, ldu, 1}, true, LOWER_A);
        for (long i = 0; i < area; i++) s[i] *= chunk.e.carry;
        product(s, V, (int)d.keys, V, n, transposed(h.k(c)), {u, ldu, 1}, true, FULL, chunk.e.until);
    }
}

// room: a stretch of chunk (3 chunk + 2 V) floats a thread
extern "C" void delta_forward(const Shape4* d, const Inputs* in, float* o, float* solved, float* starts, float* state, float* room,
                              int threads) {
    const long stretch = d->chunk * (3 * d->chunk + 2 * d->values);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long i = 0; i < d->rows * d->heads; i++)
        forward_head({*d, *in, i / d->heads, i % d->heads}, o, solved, starts, state, room + omp_get_thread_num() * stretch);
}

struct Grads {
    const float *o, *state;                         // given
    float *q, *k, *v, *g, *beta, *started;  // wanted, dense
};

static float dot(const float* a, const float* b, long n) {
    vec s{};
    over(n, [&](long i, int m) { s += get(a + i, m) * get(b + i, m); });
    return sum(s);
}

// One chunk of one head. ds [K, V] holds the gradient of the state after the chunk and becomes the one before it.
static void backward_chunk(const Head& h, long c, const float* solved, const float* start, float* ds, const Grads& g, float* room) {
    const Shape4& d = h.d;
    const long K = d.keys, V = d.values, ldk = d.heads * K, ldv = d.heads * V, ld = d.chunk, area = K * V;
    Chunk chunk;
    LogGrads logs;
    float *pairs = room + 3 * ld * ld, *du = pairs + ld * ld, *told = du + ld * V, *part = told + ld * V;
    alignas(64) float against[MAX_CHUNK];  // minus beta since: what u takes from the state, a token
    chunk.prepare(h, c, room);
    const int n = chunk.n;
    const Decays& e = chunk.e;
    const Matrix q = h.q(c), k = h.k(c), v = h.v(c), S{start, V, 1}, dS{ds, V, 1};
    const Matrix u{solved + h.token(c) * V, ldv, 1}, o{g.o + h.token(c) * V, ldv, 1};
    float *dq = g.q + h.token(c) * K, *dk = g.k + h.token(c) * K, *dv = g.v + h.token(c) * V;

    // to u from the state after and from the outputs, then through the solve: the gradient of beta (v - since k S)
    product(du, V, n, V, K, k, dS, false);
    for (int t = 0; t < n; t++)
        for (long p = 0; p < V; p++) du[t * V + p] *= e.until[t];
    product(du, V, n, V, n, {chunk.asked, 1, ld}, o, true, LOWER_A_TRANSPOSED);
    solve_transposed(du, V, chunk.system, ld, n, (int)V);

    // keys through the state after, then queries and keys through the state before
    product(dk, ldk, n, K, V, u, transposed(dS), false);
    product(dq, ldk, n, K, V, o, transposed(S), false);
    product(part, K, n, K, V, {du, V, 1}, transposed(S), false);
    product(told, V, n, V, K, k, S, false);
    float *dbeta = g.beta + h.token(c), *dg = g.g + h.token(c);
    for (int t = 0; t < n; t++) {
        float *ka = dk + t * ldk, *qa = dq + t * ldk, *pa = part + t * K;
        against[t] = -chunk.beta[t] * e.since[t];
        for (long i = 0; i < K; i++) ka[i] *= e.until[t], qa[i] *= e.since[t], pa[i] *= against[t];
        logs.outof[t] = dot(ka, k.p + t * k.row, K);
        logs.into[t] = dot(qa, q.p + t * q.row, K) + dot(pa, k.p + t * k.row, K);
        for (long i = 0; i < K; i++) ka[i] += pa[i];
        const float* w = du + t * V;
        dbeta[t * d.heads] = dot(w, v.p + t * v.row, V) - e.since[t] * dot(w, told + t * V, V);
        for (long p = 0; p < V; p++) dv[t * ldv + p] = chunk.beta[t] * w[p];
    }

    // the state before
    double across = 0;
    vec crossed{};
    over(area, [&](long i, int m) {
        crossed += get(ds + i, m) * get(start + i, m);
        put(ds + i, get(ds + i, m) * e.carry, m);
    });
    across = (double)sum(crossed) * e.carry;
    product(ds, V, (int)K, V, n, transposed(q), o, true, FULL, e.since);
    product(ds, V, (int)K, V, n, transposed(k), {du, V, 1}, true, FULL, against);

    // pairs of outputs and corrections
    logs.clear(n);
    product(pairs, ld, n, n, V, o, transposed(u), false, LOWER_OUT);
    for (int t = 0; t < n; t++)
        for (int s = 0; s < t + ROWS && s < ld; s += LANES) {
            const long at = t * ld + s;
            if (s > t) { store(pairs + at, vec{}); continue; }
            const vec pair = choose(count_up() <= (ivec)(ivec{} + (t - s)), load(pairs + at), vec{});
            logs.add(t, s, pair * load(chunk.asked + at));
            store(pairs + at, pair * e.between(t, s));
        }
    product(dq, ldk, n, K, n, {pairs, ld, 1}, k, true, LOWER_A);
    product(dk, ldk, n, K, n, {pairs, 1, ld}, q, true, LOWER_A_TRANSPOSED);

    // pairs of keys, inside the solve
    product(pairs, ld, n, n, V, {du, V, 1}, transposed(u), false, LOWER_OUT);
    for (int t = 0; t < n; t++) {
        vec strength{};
        for (int s = 0; s < t + ROWS && s < ld; s += LANES) {
            const long at = t * ld + s;
            if (s > t) { store(pairs + at, vec{}); continue; }
            const vec pair = choose(count_up() < (ivec)(ivec{} + (t - s)), -load(pairs + at), vec{});
            strength += pair * load(chunk.same + at);
            logs.add(t, s, pair * load(chunk.system + at));
            store(pairs + at, pair * e.between(t, s) * chunk.beta[t]);
        }
        dbeta[t * d.heads] += sum(strength);
    }
    product(dk, ldk, n, K, n, {pairs, ld, 1}, k, true, LOWER_A);
    product(dk, ldk, n, K, n, {pairs, 1, ld}, k, true, LOWER_A_TRANSPOSED);

    float dlogs[MAX_CHUNK];
    logs.finish(dlogs, n, across);
    for (int t = 0; t < n; t++) dg[t * d.heads] = dlogs[t];
}

// room: a stretch of chunk (4 chunk + 2 V + K) floats a thread
extern "C" void delta_backward(const Shape4* d, const Inputs* in, const float* solved, const float* starts, const Grads* g, float* room,
                               int threads) {
    const long stretch = d->chunk * (4 * d->chunk + 2 * d->values + d->keys), area = d->keys * d->values;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long i = 0; i < d->rows * d->heads; i++) {
        const Head h{*d, *in, i / d->heads, i % d->heads};
        float* ds = g->started + i * area;
        std::copy_n(g->state + i * area, area, ds);
        for (long c = d->count() - 1; c >= 0; c--)
            backward_chunk(h, c, solved, starts + h.started(c), ds, *g, room + omp_get_thread_num() * stretch);
    }
}

// The recurrence itself, token by token: the fastest way for a few tokens. state and after [rows, H, K, V] may be the same.
// room: V floats a thread
extern "C" void delta_step(const Shape4* d, const Inputs* in, float* o, float* after, float* room, int threads) {
    const long K = d->keys, V = d->values;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < d->rows * d->heads; i++) {
        const Head h{*d, *in, i / d->heads, i % d->heads};
        const float *q = h.q(0).p, *k = h.k(0).p, *v = h.v(0).p, *from = in->state ? in->state + i * K * V : nullptr;
        float *s = after + i * K * V, *out = o + h.token(0) * V, *u = room + omp_get_thread_num() * V;
        for (long t = 0; t < d->length; t++, q += in->q_token, k += in->k_token, v += in->v_token, out += d->heads * V) {
            const bool forget = !from || (in->reset && in->reset[h.row * d->length + t]);
            const float decay = std::exp(in->g[h.token(0) + t * d->heads]), beta = in->beta[h.token(0) + t * d->heads];
            delta_token(q, k, v, &decay, 0, beta, K, V, forget ? nullptr : from, s, out, u);
            from = s;
        }
    }
}
