// The gated delta rule in matrix form, forward and backward, one head at a time, chunk by chunk, out of cache.
// Letters as in reference.py. In a chunk, with e[t, s] the decay from behind s to t (never above 1):
//   (1 + L) u = beta (v - since k S)     L[t, s] = beta_t (k_t . k_s) e[t, s], s < t        solved from the top down
//   o = since q S + R u                  R[t, s] = (q_t . k_s) e[t, s], s <= t
//   S' = carry S + (until k)^T u
// A decay belongs to a head (ByHead), or to a channel of the key, inside the sums over channels (ByChannel: KDA).
#include <omp.h>

#include <algorithm>

#include "decays.h"
#include "delta/step.h"
#include "layout.h"
#include "products.h"

struct Shape {
    long rows, length, heads, keys, values, chunk, decays;  // decays of a head: 1, or one a channel of its key
    long count() const { return (length + chunk - 1) / chunk; }
    int tokens(long n) const { return (int)std::min(chunk, length - n * chunk); }
    bool by_channel() const { return decays > 1; }
};

struct Inputs {  // strides count floats; the two inner dimensions of q, k and v are dense
    const float *q, *k, *v, *g, *beta, *state;
    const uint8_t* reset;
    long q_row, q_token, k_row, k_token, v_row, v_token;
};

struct Head {  // one head of one row: where its numbers lie
    const Shape& d;
    const Inputs& in;
    long row, head;
    long token(long c) const { return (row * d.length + c * d.chunk) * d.heads + head; }
    long started(long c) const { return ((row * d.heads + head) * d.count() + c) * d.keys * d.values; }
    Matrix q(long c) const { return {in.q + row * in.q_row + c * d.chunk * in.q_token + head * d.keys, in.q_token, 1}; }
    Matrix k(long c) const { return {in.k + row * in.k_row + c * d.chunk * in.k_token + head * d.keys, in.k_token, 1}; }
    Matrix v(long c) const { return {in.v + row * in.v_row + c * d.chunk * in.v_token + head * d.values, in.v_token, 1}; }
    const float* g(long c) const { return in.g + token(c) * d.decays; }  // a token apart: heads times decays
    const uint8_t* reset(long c) const { return in.reset ? in.reset + row * d.length + c * d.chunk : nullptr; }
};

struct Grads {
    const float *o, *state;                 // given
    float *q, *k, *v, *g, *beta, *started;  // wanted, dense
};

static float dot(const float* a, const float* b, long n) {
    vec s{};
    over(n, [&](long i, int m) { s += get(a + i, m) * get(b + i, m); });
    return sum(s);
}

// What both directions need of a chunk: strengths, the two triangles of pairs with their factors, and queries and keys as they
// meet the state before it (asking, telling; times `since`) and the one after it (keeping; times `until`).
struct Chunk {
    int n;
    long ld, K;
    float beta[MAX_CHUNK];
    float *same, *asked;  // k k^T and q k^T times decay; 0 above the diagonal as far as a block of rows reads
    float* system;        // beta times same, 0 on the diagonal too: the L above
    Matrix q, k, asking, telling, keeping;

    Chunk(const Shape& d, float* room) : ld(d.chunk), K(d.keys), same(room), asked(same + ld * ld), system(asked + ld * ld) {}

    void enter(const Head& h, long c) {
        n = h.d.tokens(c), q = asking = h.q(c), k = telling = keeping = h.k(c);
        for (int t = 0; t < n; t++) beta[t] = h.in.beta[h.token(c) + t * h.d.heads];
    }

    // decay(t, s) for a vector of s: what is still missing in `same` and `asked`
    template <class Decay>
    void complete(Decay decay) {
        for (int t = 0; t < n; t++) {
            int s = 0;
            for (; s <= t; s += LANES) {
                const vec e = decay(t, s);
                const ivec upto = count_up() <= (ivec)(ivec{} + (t - s)), below = count_up() < (ivec)(ivec{} + (t - s));
                const long at = t * ld + s;
                const vec pair = choose(upto, load(same + at) * e, vec{});
                store(same + at, pair);
                store(asked + at, choose(upto, load(asked + at) * e, vec{}));
                store(system + at, choose(below, pair * beta[t], vec{}));
            }
            for (; s < t + ROWS && s < ld; s += LANES)
                for (float* m : {same, asked, system}) store(m + t * ld + s, vec{});
        }
    }
};

// One decay a head: a factor of every token and of every pair of them.
struct ByHead : Chunk {
    Decays e;
    LogGrads logs;
    double crossing;
    const float *since = e.since, *until = e.until;

    static long floats(const Shape&) { return 0; }

    ByHead(const Shape& d, float* room, float*) : Chunk(d, room) {}

    void prepare(const Head& h, long c) {
        enter(h, c);
        e.sum_up(h.g(c), h.d.heads, 1.f, h.reset(c), n);
        product(same, ld, n, n, K, k, transposed(k), false, LOWER_OUT);
        product(asked, ld, n, n, K, q, transposed(k), false, LOWER_OUT);
        complete([&](int t, int s) { return e.between(t, s); });
    }

    void fade(float* s, long V) const {
        for (long i = 0; i < K * V; i++) s[i] *= e.carry;
    }

    // The rest of the struct is the way back. Gradients of one token through the states: of its key in the state after (dk), of
    // its query (dq) and key (part) in the one before; `against`: minus beta since
    void through_states(int t, float* dk, float* dq, float* part, float against) {
        for (long i = 0; i < K; i++) dk[i] *= e.until[t], dq[i] *= e.since[t], part[i] *= against;
        logs.outof[t] = dot(dk, k.p + t * k.row, K);
        logs.into[t] = dot(dq, q.p + t * q.row, K) + dot(part, k.p + t * k.row, K);
        for (long i = 0; i < K; i++) dk[i] += part[i];
    }

    // the state's gradient past the chunk
    void across(float* ds, const float* start, long V) {
        vec crossed{};
        over(K * V, [&](long i, int m) {
            crossed += get(ds + i, m) * get(start + i, m);
            put(ds + i, get(ds + i, m) * e.carry, m);
        });
        crossing = (double)sum(crossed) * e.carry;
        logs.clear(n);
    }

    // pairs: the gradient of `asked`
    void through_outputs(float* pairs, float* dq, float* dk, long ldk) {
        for (int t = 0; t < n; t++)
            for (int s = 0; s < t + ROWS && s < ld; s += LANES) {
                const long at = t * ld + s;
                if (s > t) { store(pairs + at, vec{}); continue; }
                const vec pair = choose(count_up() <= (ivec)(ivec{} + (t - s)), load(pairs + at), vec{});
                logs.add(t, s, pair * load(asked + at));
                store(pairs + at, pair * e.between(t, s));
            }
        product(dq, ldk, n, K, n, {pairs, ld, 1}, k, true, LOWER_A);
        product(dk, ldk, n, K, n, {pairs, 1, ld}, q, true, LOWER_A_TRANSPOSED);
    }

    // pairs: minus the gradient of `system`, which gives that of the strengths too
    void through_solve(float* pairs, float*, float* dk, long ldk, float* dbeta, long step) {
        for (int t = 0; t < n; t++) {
            vec strength{};
            for (int s = 0; s < t + ROWS && s < ld; s += LANES) {
                const long at = t * ld + s;
                if (s > t) { store(pairs + at, vec{}); continue; }
                const vec pair = choose(count_up() < (ivec)(ivec{} + (t - s)), -load(pairs + at), vec{});
                strength += pair * load(same + at);
                logs.add(t, s, pair * load(system + at));
                store(pairs + at, pair * e.between(t, s) * beta[t]);
            }
            dbeta[t * step] += sum(strength);
        }
        product(dk, ldk, n, K, n, {pairs, ld, 1}, k, true, LOWER_A);
        product(dk, ldk, n, K, n, {pairs, 1, ld}, k, true, LOWER_A_TRANSPOSED);
    }

    void finish(const Head& h, long c, const float*, const float*, float*, float* dg) {
        float dlogs[MAX_CHUNK];
        logs.finish(dlogs, n, crossing);
        for (int t = 0; t < n; t++) dg[t * h.d.heads] = dlogs[t];
    }
};

constexpr long CHANNEL_ROOM = 9;  // floats a channel and token of a chunk, where every channel has its decay
constexpr int PIECE = 16;  // tokens of a chunk whose pairs with each other are found one by one

// One decay a channel of the key (KDA). A decay is always a product of tokens' own factors, none above 1 and none divided by;
// where a document begins it is 0. A chunk is cut into pieces: pairs inside a piece are taken token by token, and a pair of two
// pieces meets at the beginning of the later one, the earlier token faded until there, the later one since there.
struct ByChannel : Chunk {
    float ones[MAX_CHUNK];
    const float *since = ones, *until = ones;  // both are in asking, telling and keeping already
    float *factor, *q_in, *k_in, *k_out;       // [n, K] a token's own decay; what asking, telling and keeping are
    float *whole, *carry;                      // [pieces, K] the decay through a piece; [K] through the chunk
    float *run, *last;                         // [K] a decay that grows from token to token; gradients that pass the chunk's end
    float *faded, *dk_solve, *rows, *mixed;    // the way back: [n, K], [n, K], [PIECE, K], [PIECE, K]
    const uint8_t* begins;

    // more than the (6 chunk + chunk / PIECE + 2 PIECE + 3) K below, as a chunk is a multiple of 16
    static long floats(const Shape& d) { return CHANNEL_ROOM * d.chunk * d.keys; }

    ByChannel(const Shape& d, float* room, float* own) : Chunk(d, room) {
        std::fill(ones, ones + MAX_CHUNK, 1.f);
        for (float** to : {&factor, &q_in, &k_in, &k_out, &faded, &dk_solve}) *to = own, own += ld * K;
        for (float** to : {&rows, &mixed}) *to = own, own += PIECE * K;
        for (float** to : {&carry, &run, &last}) *to = own, own += K;
        whole = own;
    }

    void fill(float* to, float f) const { std::fill(to, to + K, f); }
    // to = a * b, a row of channels each
    void times(float* to, const float* a, const float* b) const {
        over(K, [&](long i, int m) { put(to + i, get(a + i, m) * get(b + i, m), m); });
    }
    const float* q_of(int t) const { return q.p + t * q.row; }
    const float* k_of(int t) const { return k.p + t * k.row; }
    int end(int first) const { return std::min(first + PIECE, n); }

    void prepare(const Head& h, long c) {
        enter(h, c);
        begins = h.reset(c);
        const float* g = h.g(c);
        for (int t = 0; t < n; t++, g += h.d.heads * K) {
            float* f = factor + t * K;
            if (begins && begins[t]) fill(f, 0.f);
            else over(K, [&](long i, int m) { put(f + i, exp(get(g + i, m)), m); });
        }
        for (int first = 0; first < n; first += PIECE) {
            fade_into(first, q, q_in + first * K);
            fade_into(first, k, k_in + first * K);
            if (first) {
                const Matrix earlier = transposed({k_out, K, 1});
                product(same + first * ld, ld, end(first) - first, first, K, {k_in + first * K, K, 1}, earlier, false);
                product(asked + first * ld, ld, end(first) - first, first, K, {q_in + first * K, K, 1}, earlier, false);
            }
            inside(first);
            fade_out(first, k_out);
        }
        fill(carry, 1.f);
        for (int first = 0; first < n; first += PIECE) {
            for (int t = first; first && t < end(first); t++)
                times(q_in + t * K, q_in + t * K, carry), times(k_in + t * K, k_in + t * K, carry);
            times(carry, carry, whole + first / PIECE * K);
        }
        asking = {q_in, K, 1}, telling = {k_in, K, 1}, keeping = {k_out, K, 1};
        complete([](int, int) { return all(1.f); });
    }

    // to [PIECE, K]: the rows of x in a piece, faded since its beginning
    void fade_into(int first, Matrix x, float* to) const {
        fill(run, 1.f);
        for (int t = first; t < end(first); t++, to += K) {
            times(run, run, factor + t * K);
            times(to, x.p + t * x.row, run);
        }
    }

    // to [n, K]: keys before the end of this piece, faded until there; those before its beginning stand there already
    void fade_out(int first, float* to) const {
        fill(run, 1.f);
        for (int s = end(first) - 1; s >= first; s--) {
            times(to + s * K, k_of(s), run);
            times(run, run, factor + s * K);
        }
        std::copy_n(run, K, whole + first / PIECE * K);
        for (int s = 0; s < first; s++) times(to + s * K, to + s * K, run);
    }

    // pairs of a piece with itself
    void inside(int first) {
        for (int s = first; s < end(first); s++) {
            std::copy_n(k_of(s), K, run);
            for (int t = s; t < end(first); t++) {
                vec keys{}, queries{};
                if (t > s) times(run, run, factor + t * K);
                over(K, [&](long i, int m) {
                    const vec retrieved = get(run + i, m);
                    keys += retrieved * get(k_of(t) + i, m);
                    queries += retrieved * get(q_of(t) + i, m);
                });
                same[t * ld + s] = sum(keys), asked[t * ld + s] = sum(queries);
            }
        }
    }

    void fade(float* s, long V) const {
        for (long i = 0; i < K; i++)
            for (long p = 0; p < V; p++) s[i * V + p] *= carry[i];
    }

    // The way back, as in ByHead. dk stays the gradient of what is kept, the key faded; `part` is that of the key as it asks
    void through_states(int t, float* dk, float* dq, float* part, float against) {
        if (t == 0) fill(run, 1.f), fill(last, 0.f);
        over(K, [&](long i, int m) {
            const vec since = get(run + i, m) * get(factor + t * K + i, m);
            put(run + i, since, m);
            put(last + i, get(last + i, m) + get(k_out + t * K + i, m) * get(dk + i, m), m);
            put(dq + i, get(dq + i, m) * since, m);
            put(part + i, get(part + i, m) * since * against, m);
        });
    }

    void across(float* ds, const float* start, long V) {
        for (long i = 0; i < K; i++, ds += V, start += V) {
            last[i] += carry[i] * dot(ds, start, V);
            over(V, [&](long p, int m) { put(ds + p, get(ds + p, m) * carry[i], m); });
        }
    }

    void through_outputs(float* pairs, float* dq, float* dk, long ldk) { send(pairs, q, dq, ldk, dk, ldk); }

    void through_solve(float* pairs, float* part, float*, long, float* dbeta, long step) {
        for (int t = 0; t < n; t++) {
            vec strength{};
            for (int s = 0; s <= t; s += LANES) {
                const long at = t * ld + s;
                const vec pair = choose(count_up() < (ivec)(ivec{} + (t - s)), -load(pairs + at), vec{});
                strength += pair * load(same + at);
                store(pairs + at, pair * beta[t]);
            }
            dbeta[t * step] += sum(strength);
        }
        std::fill(dk_solve, dk_solve + n * K, 0.f);
        send(pairs, k, part, K, dk_solve, K);
    }

    // pairs [t, s], s <= t: the gradient of x_t . k_s with their decay. Adds to dx, the gradient of x; dk comes as the gradient of
    // keys faded until the chunk's end and leaves as that of the keys.
    void send(const float* pairs, Matrix x, float* dx, long ldx, float* dk, long ldk) {
        for (int first = (n - 1) / PIECE * PIECE; first >= 0; first -= PIECE) {
            if (first) {
                fade_into(first, x, rows);
                for (int s = 0; s < first; s++) times(dk + s * ldk, dk + s * ldk, whole + first / PIECE * K);
                product(dk, ldk, first, K, end(first) - first, {pairs + first * ld, 1, ld}, {rows, K, 1}, true);
            }
            fill(run, 1.f);
            for (int s = end(first) - 1; s >= first; s--) {
                times(dk + s * ldk, dk + s * ldk, run);
                times(run, run, factor + s * K);
            }
        }
        for (int first = 0; first < n; first += PIECE) {
            if (first) {
                product(mixed, K, end(first) - first, K, first, {pairs + first * ld, ld, 1}, {faded, K, 1}, false);
                fill(run, 1.f);
                for (int t = first; t < end(first); t++) {
                    times(run, run, factor + t * K);
                    over(K, [&](long i, int m) {
                        put(dx + t * ldx + i, get(dx + t * ldx + i, m) + get(run + i, m) * get(mixed + (t - first) * K + i, m), m);
                    });
                }
            }
            for (int s = first; s < end(first); s++) {
                fill(run, 1.f);
                for (int t = s; t < end(first); t++) {
                    const float pair = pairs[t * ld + s];
                    if (t > s) times(run, run, factor + t * K);
                    over(K, [&](long i, int m) {
                        const vec e = get(run + i, m) * pair;
                        put(dx + t * ldx + i, get(dx + t * ldx + i, m) + e * get(k_of(s) + i, m), m);
                        put(dk + s * ldk + i, get(dk + s * ldk + i, m) + e * get(x.p + t * x.row + i, m), m);
                    });
                }
            }
            fade_out(first, faded);
        }
    }

    // A token's factor stands in every decay from before it to it or later. So the gradient of its logarithm is a sum over the
    // tokens from it on: what comes back through a token as it asks (x dx), less what comes back through it as it is remembered
    void finish(const Head& h, long c, const float* dq, const float* part, float* dk, float* dg) {
        const long ldk = h.d.heads * K;
        over(K, [&](long i, int m) {
            dvec total = __builtin_convertvector(get(last + i, m), dvec);
            for (int t = n - 1; t >= 0; t--) {
                const vec key = get(k_of(t) + i, m), asks = get(part + t * K + i, m);
                const vec retrieved = get(dk + t * ldk + i, m) + get(dk_solve + t * K + i, m);
                const vec mine = get(q_of(t) + i, m) * get(dq + t * ldk + i, m) + key * asks - key * retrieved;
                total += __builtin_convertvector(mine, dvec);
                put(dk + t * ldk + i, retrieved + asks, m);
                if (begins && begins[t]) total = dvec{};
                put(dg + t * ldk + i, __builtin_convertvector(total, vec), m);
            }
        });
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

template <class C>
static void forward_head(const Head& h, float* o, float* solved, float* starts, float* state, float* room) {
    const Shape& d = h.d;
    const long area = d.keys * d.values, V = d.values, ldo = d.heads * V;
    float *s = state + (h.row * d.heads + h.head) * area, *retrieved = room + 3 * d.chunk * d.chunk, *mine = retrieved + d.chunk * V;
    C chunk(d, room, mine + d.chunk * V);
    if (h.in.state) std::copy_n(h.in.state + (h.row * d.heads + h.head) * area, area, s);
    else std::fill(s, s + area, 0.f);
    for (long c = 0; c < d.count(); c++) {
        chunk.prepare(h, c);
        const int n = chunk.n;
        const Matrix S{s, V, 1}, v = h.v(c);
        if (starts) std::copy(s, s + area, starts + h.started(c));
        float* u = solved ? solved + h.token(c) * V : mine;
        const long ldu = solved ? ldo : V;
        product(retrieved, V, n, V, d.keys, chunk.telling, S, false);
        for (int t = 0; t < n; t++)
            for (long p = 0; p < V; p++)
                u[t * ldu + p] = chunk.beta[t] * (v.p[t * v.row + p] - chunk.since[t] * retrieved[t * V + p]);
        solve(u, ldu, chunk.system, d.chunk, n, (int)V);
        float* out = o + h.token(c) * V;
        product(retrieved, V, n, V, d.keys, chunk.asking, S, false);
        for (int t = 0; t < n; t++)
            for (long p = 0; p < V; p++) out[t * ldo + p] = chunk.since[t] * retrieved[t * V + p];
        product(out, ldo, n, V, n, {chunk.asked, d.chunk, 1}, {u, ldu, 1}, true, LOWER_A);
        chunk.fade(s, V);
        product(s, V, (int)d.keys, V, n, transposed(chunk.keeping), {u, ldu, 1}, true, FULL, chunk.until);
    }
}

// room: a stretch of chunk (3 chunk + 2 V) floats a thread, and CHANNEL_ROOM chunk K more where every channel has its decay
extern "C" void delta_forward(const Shape* d, const Inputs* in, float* o, float* solved, float* starts, float* state, float* room,
                              int threads) {
    const auto head = d->by_channel() ? forward_head<ByChannel> : forward_head<ByHead>;
    const long own = d->by_channel() ? ByChannel::floats(*d) : ByHead::floats(*d);
    const long stretch = d->chunk * (3 * d->chunk + 2 * d->values) + own;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long i = 0; i < d->rows * d->heads; i++)
        head({*d, *in, i / d->heads, i % d->heads}, o, solved, starts, state, room + omp_get_thread_num() * stretch);
}

// One chunk of one head. ds [K, V] holds the gradient of the state after the chunk and becomes the one before it.
template <class C>
static void backward_chunk(const Head& h, long c, const float* solved, const float* start, float* ds, const Grads& g, float* room) {
    const Shape& d = h.d;
    const long K = d.keys, V = d.values, ldk = d.heads * K, ldv = d.heads * V, ld = d.chunk;
    float *pairs = room + 3 * ld * ld, *du = pairs + ld * ld, *retrieved = du + ld * V, *part = retrieved + ld * V;
    alignas(64) float against[MAX_CHUNK];  // minus beta since: what u takes from the state, a token
    C chunk(d, room, part + ld * K);
    chunk.prepare(h, c);
    const int n = chunk.n;
    const Matrix v = h.v(c), S{start, V, 1}, dS{ds, V, 1};
    const Matrix u{solved + h.token(c) * V, ldv, 1}, o{g.o + h.token(c) * V, ldv, 1};
    float *dq = g.q + h.token(c) * K, *dk = g.k + h.token(c) * K, *dv = g.v + h.token(c) * V;

    // to u from the state after and from the outputs, then through the solve: the gradient of beta (v - since k S)
    product(du, V, n, V, K, chunk.keeping, dS, false);
    for (int t = 0; t < n; t++)
        for (long p = 0; p < V; p++) du[t * V + p] *= chunk.until[t];
    product(du, V, n, V, n, {chunk.asked, 1, ld}, o, true, LOWER_A_TRANSPOSED);
    solve_transposed(du, V, chunk.system, ld, n, (int)V);

    // keys through the state after, then queries and keys through the state before
    product(dk, ldk, n, K, V, u, transposed(dS), false);
    product(dq, ldk, n, K, V, o, transposed(S), false);
    product(part, K, n, K, V, {du, V, 1}, transposed(S), false);
    product(retrieved, V, n, V, K, chunk.telling, S, false);
    float* dbeta = g.beta + h.token(c);
    for (int t = 0; t < n; t++) {
        against[t] = -chunk.beta[t] * chunk.since[t];
        chunk.through_states(t, dk + t * ldk, dq + t * ldk, part + t * K, against[t]);
        const float* w = du + t * V;
        dbeta[t * d.heads] = dot(w, v.p + t * v.row, V) - chunk.since[t] * dot(w, retrieved + t * V, V);
        for (long p = 0; p < V; p++) dv[t * ldv + p] = chunk.beta[t] * w[p];
    }

    // the state before
    chunk.across(ds, start, V);
    product(ds, V, (int)K, V, n, transposed(chunk.asking), o, true, FULL, chunk.since);
    product(ds, V, (int)K, V, n, transposed(chunk.telling), {du, V, 1}, true, FULL, against);

    // pairs of outputs and corrections, then of keys, inside the solve
    product(pairs, ld, n, n, V, o, transposed(u), false, LOWER_OUT);
    chunk.through_outputs(pairs, dq, dk, ldk);
    product(pairs, ld, n, n, V, {du, V, 1}, transposed(u), false, LOWER_OUT);
    chunk.through_solve(pairs, part, dk, ldk, dbeta, d.heads);
    chunk.finish(h, c, dq, part, dk, g.g + h.token(c) * d.decays);
}

// room: a stretch of chunk (4 chunk + 2 V + K) floats a thread, and CHANNEL_ROOM chunk K more where every channel has its decay
extern "C" void delta_backward(const Shape* d, const Inputs* in, const float* solved, const float* starts, const Grads* g, float* room,
                               int threads) {
    const auto chunk = d->by_channel() ? backward_chunk<ByChannel> : backward_chunk<ByHead>;
    const long own = d->by_channel() ? ByChannel::floats(*d) : ByHead::floats(*d), area = d->keys * d->values;
    const long stretch = d->chunk * (4 * d->chunk + 2 * d->values + d->keys) + own;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long i = 0; i < d->rows * d->heads; i++) {
        const Head h{*d, *in, i / d->heads, i % d->heads};
        float* ds = g->started + i * area;
        std::copy_n(g->state + i * area, area, ds);
        for (long c = d->count() - 1; c >= 0; c--)
            chunk(h, c, solved, starts + h.started(c), ds, *g, room + omp_get_thread_num() * stretch);
    }
}

// The recurrence itself, token by token: the fastest way for a few tokens. state and after [rows, H, K, V] may be the same.
// room: V + K floats a thread
extern "C" void delta_step(const Shape* d, const Inputs* in, float* o, float* after, float* room, int threads) {
    const long K = d->keys, V = d->values, apart = d->heads * d->decays;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < d->rows * d->heads; i++) {
        const Head h{*d, *in, i / d->heads, i % d->heads};
        const float *q = h.q(0).p, *k = h.k(0).p, *v = h.v(0).p, *g = h.g(0), *from = in->state ? in->state + i * K * V : nullptr;
        float *s = after + i * K * V, *out = o + h.token(0) * V, *u = room + omp_get_thread_num() * (V + K), *decay = u + V;
        for (long t = 0; t < d->length; t++, out += d->heads * V) {
            const bool forget = !from || (in->reset && in->reset[h.row * d->length + t]);
            if (d->by_channel()) over(K, [&](long j, int n) { put(decay + j, exp(get(g + j, n)), n); });
            else decay[0] = std::exp(g[0]);
            const float beta = in->beta[h.token(0) + t * d->heads];
            delta_token(q, k, v, decay, d->by_channel(), beta, K, V, forget ? nullptr : from, s, out, u);
            from = s;
            q += in->q_token, k += in->k_token, v += in->v_token, g += apart;
        }
    }
}

LAYOUT(STRUCT(Shape, rows, length, heads, keys, values, chunk, decays)
       STRUCT(Inputs, q, k, v, g, beta, state, reset, q_row, q_token, k_row, k_token, v_row, v_token)
       STRUCT(Grads, o, state, q, k, v, g, beta, started)
       NUMBER(MAX_CHUNK, MAX_CHUNK)
       NUMBER(CHANNEL_ROOM, CHANNEL_ROOM))
