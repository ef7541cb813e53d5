// The Mamba2 recurrence in matrix form, forward and backward, one head at a time, chunk by chunk, out of cache.
// Letters as in reference.py; a state lies as [S, P] inside, so that every product runs along its rows.
#include <omp.h>

#include <algorithm>

#include "decays.h"
#include "layout.h"
#include "products.h"
#include "scan/step.h"

struct Shape {
    long rows, length, heads, size, groups, width, chunk;
    long count() const { return (length + chunk - 1) / chunk; }
    int tokens(long n) const { return (int)std::min(chunk, length - n * chunk); }
};

struct Inputs {  // strides count floats; the two inner dimensions of x, B and C are dense
    const float *x, *dt, *A, *B, *C, *D, *state;
    const uint8_t* reset;
    long x_row, x_token, B_row, B_token, C_row, C_token;
};

// scores [rows, groups, count, chunk, chunk]: C B^T inside every chunk, shared by the heads of a group
static void score(const Shape& d, const Inputs& in, float* scores, int threads) {
    const long n = d.count();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < d.rows * d.groups * n; i++) {
        const long c = i % n, g = i / n % d.groups, r = i / n / d.groups;
        const int q = d.tokens(c);
        const Matrix C{in.C + r * in.C_row + c * d.chunk * in.C_token + g * d.width, in.C_token, 1};
        const Matrix B{in.B + r * in.B_row + c * d.chunk * in.B_token + g * d.width, in.B_token, 1};
        product(scores + i * d.chunk * d.chunk, d.chunk, q, q, d.width, C, transposed(B), false, LOWER_OUT);
    }
}

struct Head {  // one head of one row: where its numbers lie
    const Shape& d;
    const Inputs& in;
    long row, head, group;
    Head(const Shape& d, const Inputs& in, long row, long head)
        : d(d), in(in), row(row), head(head), group(head / (d.heads / d.groups)) {}
    long at(long c) const { return ((row * d.length + c * d.chunk) * d.heads + head) * d.size; }  // in y
    const float* x(long c) const { return in.x + row * in.x_row + c * d.chunk * in.x_token + head * d.size; }
    const float* dt(long c) const { return in.dt + (row * d.length + c * d.chunk) * d.heads + head; }
    Matrix B(long c) const { return {in.B + row * in.B_row + c * d.chunk * in.B_token + group * d.width, in.B_token, 1}; }
    Matrix C(long c) const { return {in.C + row * in.C_row + c * d.chunk * in.C_token + group * d.width, in.C_token, 1}; }
    const float* scores(const float* all, long c) const {
        return all + ((row * d.groups + group) * d.count() + c) * d.chunk * d.chunk;
    }
    void decays(Decays& e, long c) const {
        e.sum_up(dt(c), d.heads, in.A[head], in.reset ? in.reset + row * d.length + c * d.chunk : nullptr, d.tokens(c));
    }
};

static void turn_state(float* to, const float* from, long rows, long cols) {  // [rows, cols] -> [cols, rows]
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < cols; j++) to[j * rows + i] = from[i * cols + j];
}

// weights[t, s] = scores * decay, scaled by dt_s where given; 0 above the diagonal as far as a block of rows reads
static void weigh(float* weights, const float* scores, const Decays& e, const float* dt, long chunk) {
    for (int t = 0; t < e.tokens; t++) {
        int s = 0;
        for (; s <= t; s += LANES) {
            vec w = load(scores + t * chunk + s) * e.between(t, s);
            // a score above the diagonal was never written, and 0 times it may be NaN
            if (s + LANES > t + 1) w = choose(count_up() <= (ivec)(ivec{} + (t - s)), w, vec{});
            store(weights + t * chunk + s, dt ? w * load(dt + s) : w);
        }
        for (; s < t + ROWS && s < chunk; s += LANES) store(weights + t * chunk + s, vec{});
    }
}

static void forward_head(const Head& h, const float* scores, float* y, float* carried, float* starts, float* state, float* room) {
    const Shape& d = h.d;
    const long area = d.width * d.size;
    float *s = room, *weights = s + area;
    Decays e;
    alignas(64) float dt[MAX_CHUNK + LANES], fed[MAX_CHUNK];
    if (h.in.state) turn_state(s, h.in.state + (h.row * d.heads + h.head) * area, d.size, d.width);
    else std::fill(s, s + area, 0.f);
    for (long c = 0; c < d.count(); c++) {
        const int q = d.tokens(c);
        h.decays(e, c);
        for (int t = 0; t < q; t++) dt[t] = h.dt(c)[t * d.heads], fed[t] = dt[t] * e.until[t];
        for (int t = q; t < q + LANES; t++) dt[t] = 0;
        const Matrix x{h.x(c), h.in.x_token, 1};
        const long ldy = d.heads * d.size;
        float* out = y + h.at(c);
        if (starts) std::copy(s, s + area, starts + ((h.row * d.heads + h.head) * d.count() + c) * area);
        // what the state says and the skip, then what the chunk's own tokens say
        product(out, ldy, q, d.size, d.width, h.C(c), {s, d.size, 1}, false);
        const float skip = h.in.D ? h.in.D[h.head] : 0.f;
        for (int t = 0; t < q; t++) {
            float *to = out + t * ldy, *kept = carried ? carried + h.at(c) + t * ldy : to;
            const float* from = x.p + t * x.row;
#pragma omp simd
            for (long p = 0; p < d.size; p++) {
                const float carried = e.since[t] * to[p];
                kept[p] = carried;
                to[p] = carried + skip * from[p];
            }
        }
        weigh(weights, h.scores(scores, c), e, dt, d.chunk);
        product(out, ldy, q, d.size, q, {weights, d.chunk, 1}, x, true, LOWER_A);
        for (long i = 0; i < area; i++) s[i] *= e.carry;
        product(s, d.size, (int)d.width, d.size, q, transposed(h.B(c)), x, true, FULL, fed);
    }
    turn_state(state + (h.row * d.heads + h.head) * area, s, d.width, d.size);
}

// room: a stretch of (S P + chunk chunk) floats a thread
extern "C" void scan_forward(const Shape* d, const Inputs* in, float* scores, float* y, float* carried, float* starts,
                             float* state, float* room, int threads) {
    score(*d, *in, scores, threads);
    const long stretch = d->width * d->size + d->chunk * d->chunk;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long i = 0; i < d->rows * d->heads; i++)
        forward_head({*d, *in, i / d->heads, i % d->heads}, scores, y, carried, starts, state, room + omp_get_thread_num() * stretch);
}

struct Grads {
    const float *y, *state;  // given; either may be null
    float *x, *dt, *A, *D, *started;  // wanted: dense; A and D are [rows, heads]
    float *B, *C, *scores;  // wanted: a part for every block of heads, B and C turned: [blocks, count, S, chunk]
};

struct Rooms {  // one thread's floats
    float *weights, *pairs, *fed, *readout;
    Rooms(float* p, const Shape& d)
        : weights(p), pairs(p + d.chunk * d.chunk), fed(pairs + d.chunk * d.chunk), readout(fed + d.chunk * d.size) {}
    static long floats(const Shape& d) { return 2 * d.chunk * (d.chunk + d.size); }
};

// One chunk of one head. ds [S, P] holds the gradient of the state after the chunk and becomes the one before it.
static void backward_chunk(const Head& h, long c, const float* scores, const float* carried, const float* start, float* ds,
                           const Grads& g, float* dB, float* dC, float* dscores, Rooms room, double& dA, double& dD) {
    const Shape& d = h.d;
    const int q = d.tokens(c);
    const long ldy = d.heads * d.size, area = d.width * d.size, P = d.size;
    Decays e;
    LogGrads logs;
    alignas(64) float dt[MAX_CHUNK], left[MAX_CHUNK], grads[MAX_CHUNK];
    h.decays(e, c);
    for (int t = 0; t < q; t++) dt[t] = h.dt(c)[t * d.heads], left[t] = dt[t] * e.until[t];
    const Matrix x{h.x(c), h.in.x_token, 1}, dy{g.y + h.at(c), ldy, 1}, S{start, P, 1}, dS{ds, P, 1};
    const float* score = h.scores(scores, c);

    // what the state's gradient says to each token, then what later outputs say: the gradient of dt x
    product(room.fed, P, q, P, d.width, h.B(c), dS, false);
    for (int s = 0; s < q; s++) {
        vec total{};
        float out = 0, *f = room.fed + s * P;
        long p = 0;
        for (; p + LANES <= P; p += LANES) store(f + p, load(f + p) * e.until[s]), total += load(f + p) * load(x.p + s * x.row + p);
        for (; p < P; p++) f[p] *= e.until[s], out += f[p] * x.p[s * x.row + p];
        logs.outof[s] = dt[s] * (out + sum(total));
    }
    weigh(room.weights, score, e, nullptr, d.chunk);
    product(room.fed, P, q, P, q, {room.weights, 1, d.chunk}, dy, true, LOWER_A_TRANSPOSED);

    // pairs of tokens: the gradient of the scores and of their decays
    product(room.pairs, d.chunk, q, q, P, dy, transposed(x), false, LOWER_OUT, nullptr, dt);
    logs.clear(q);
    for (int t = 0; t < q; t++)
        for (int s = 0; s <= t; s += LANES) {
            vec pair = load(room.pairs + t * d.chunk + s);
            if (s + LANES > t + 1) pair = choose(count_up() <= (ivec)(ivec{} + (t - s)), pair, vec{});
            float* ds_ = dscores + t * d.chunk + s;
            store(ds_, load(ds_) + pair * e.between(t, s));
            logs.add(t, s, pair * load(room.weights + t * d.chunk + s));
        }

    // through the state: to C and B (turned), to the state before, and to the decays on the way
    product(dC, d.chunk, (int)d.width, q, P, S, transposed(dy), true, FULL, nullptr, e.since);
    product(dB, d.chunk, (int)d.width, q, P, dS, transposed(x), true, FULL, nullptr, left);
    vec crossed{};
    double across = 0;
    long i = 0;
    for (; i + LANES <= area; i += LANES) crossed += load(ds + i) * load(start + i), store(ds + i, load(ds + i) * e.carry);
    for (; i < area; i++) across += (double)ds[i] * start[i], ds[i] *= e.carry;
    across = (across + sum(crossed)) * e.carry;
    product(ds, P, (int)d.width, P, q, transposed(h.C(c)), dy, true, FULL, e.since);

    const float skip = h.in.D ? h.in.D[h.head] : 0.f;
    for (int t = 0; t < q; t++) {
        const float *out = dy.p + t * ldy, *kept = carried + h.at(c) + t * ldy, *in = x.p + t * x.row, *f = room.fed + t * P;
        float into = 0, self = 0, step = 0, *dx = g.x + h.at(c) + t * ldy;
#pragma omp simd reduction(+ : into, self, step)
        for (long p = 0; p < P; p++) {
            into += out[p] * kept[p];
            self += out[p] * in[p];
            step += f[p] * in[p];
            dx[p] = dt[t] * f[p] + skip * out[p];
        }
        logs.into[t] = into;
        dD += self;
        grads[t] = step;
    }
    float dlogs[MAX_CHUNK];
    logs.finish(dlogs, q, across);
    float* ddt = g.dt + (h.row * d.length + c * d.chunk) * d.heads + h.head;
    for (int t = 0; t < q; t++) {
        ddt[t * d.heads] = grads[t] + h.in.A[h.head] * dlogs[t];
        dA += (double)dt[t] * dlogs[t];
    }
}

// Heads [first, last) of one row, all of one group, from the last chunk to the first.
static void backward_block(const Shape& d, const Inputs& in, long row, long first, long last, long block, const float* scores,
                           const float* carried, const float* starts, const Grads& g, float* room) {
    const long area = d.width * d.size, square = d.chunk * d.chunk, turned = d.width * d.chunk;
    float* ds = room + Rooms::floats(d);
    double dA[64] = {}, dD[64] = {};
    for (long head = first; head < last; head++) {
        float* mine = ds + (head - first) * area;
        if (g.state) turn_state(mine, g.state + (row * d.heads + head) * area, d.size, d.width);
        else std::fill(mine, mine + area, 0.f);
    }
    for (long c = d.count() - 1; c >= 0; c--) {
        float *dB = g.B + (block * d.count() + c) * turned, *dC = g.C + (block * d.count() + c) * turned;
        float* dscores = g.scores + (block * d.count() + c) * square;
        std::fill(dB, dB + turned, 0.f);
        std::fill(dC, dC + turned, 0.f);
        std::fill(dscores, dscores + square, 0.f);
        for (long head = first; head < last; head++) {
            const float* start = starts + ((row * d.heads + head) * d.count() + c) * area;
            backward_chunk({d, in, row, head}, c, scores, carried, start, ds + (head - first) * area, g, dB, dC, dscores,
                           {room, d}, dA[head - first], dD[head - first]);
        }
    }
    for (long head = first; head < last; head++) {
        turn_state(g.started + (row * d.heads + head) * area, ds + (head - first) * area, d.width, d.size);
        g.A[row * d.heads + head] = (float)dA[head - first];
        g.D[row * d.heads + head] = (float)dD[head - first];
    }
}

// Add up the blocks of each group, and send the scores' gradient on: dB, dC dense [rows, length, groups, S].
static void gather(const Shape& d, const Inputs& in, const Grads& g, long blocks, float* dB, float* dC, int threads) {
    const long n = d.count(), turned = d.width * d.chunk, square = d.chunk * d.chunk;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < d.rows * d.groups * n; i++) {
        const long c = i % n, group = i / n % d.groups, row = i / n / d.groups, first = (row * d.groups + group) * blocks;
        const int q = d.tokens(c);
        auto collect = [&](float* parts, long size) {
            float* sum = parts + (first * n + c) * size;
            for (long b = 1; b < blocks; b++)
                for (long j = 0; j < size; j++) sum[j] += parts[((first + b) * n + c) * size + j];
            return sum;
        };
        const float *ds = collect(g.scores, square), *tB = collect(g.B, turned), *tC = collect(g.C, turned);
        const Head h{d, in, row, group * (d.heads / d.groups)};
        const long ld = d.groups * d.width, at = (row * d.length + c * d.chunk) * ld + group * d.width;
        for (int t = 0; t < q; t++)
            for (long s = 0; s < d.width; s++) dB[at + t * ld + s] = tB[s * d.chunk + t], dC[at + t * ld + s] = tC[s * d.chunk + t];
        product(dC + at, ld, q, (int)d.width, q, {ds, d.chunk, 1}, h.B(c), true, LOWER_A);
        product(dB + at, ld, q, (int)d.width, q, {ds, 1, d.chunk}, h.C(c), true, LOWER_A_TRANSPOSED);
    }
}

// block: heads that share a part of dB, dC and the scores' gradient (at most 64, a divisor of a group's heads)
extern "C" void scan_backward(const Shape* d, const Inputs* in, const float* scores, const float* carried, const float* starts,
                              const Grads* g, long block, float* dB, float* dC, float* room, int threads) {
    const long blocks = d->heads / block, stretch = Rooms::floats(*d) + block * d->width * d->size;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long i = 0; i < d->rows * blocks; i++)
        backward_block(*d, *in, i / blocks, i % blocks * block, (i % blocks + 1) * block, i, scores, carried, starts, *g,
                       room + omp_get_thread_num() * stretch);
    gather(*d, *in, *g, blocks / d->groups, dB, dC, threads);
}

// The recurrence itself, token by token: the fastest way for a few tokens. state and after [rows, H, P, S] may be the same.
extern "C" void scan_step(const Shape* d, const Inputs* in, float* y, float* after, int threads) {
    const long P = d->size, S = d->width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < d->rows * d->heads; i++) {
        const Head h{*d, *in, i / d->heads, i % d->heads};
        const float *x = h.x(0), *B = h.B(0).p, *C = h.C(0).p, *dt = h.dt(0), *from = in->state ? in->state + i * P * S : nullptr;
        float *s = after + i * P * S, *out = y + h.at(0);
        for (long t = 0; t < d->length; t++, x += in->x_token, B += in->B_token, C += in->C_token, out += d->heads * P) {
            const float step = dt[t * d->heads], decay = std::exp(step * in->A[h.head]);
            const bool forget = !from || (in->reset && in->reset[h.row * d->length + t]);
            scan_token(x, step, decay, B, C, in->D ? in->D[h.head] : 0.f, P, S, forget ? nullptr : from, s, out);
            from = s;
        }
    }
}

LAYOUT(STRUCT(Shape, rows, length, heads, size, groups, width, chunk)
       STRUCT(Inputs, x, dt, A, B, C, D, state, reset, x_row, x_token, B_row, B_token, C_row, C_token)
       STRUCT(Grads, y, state, x, dt, A, D, started, B, C, scores)
       NUMBER(MAX_CHUNK, MAX_CHUNK))
