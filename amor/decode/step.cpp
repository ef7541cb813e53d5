// One token a row through recurrent layers: norms, products, convolution, recurrences, gates, MLPs.
// States are updated in place. A row is computed by itself: its bits do not depend on the other rows.
#include <omp.h>

#include "skinny.h"
#include "turn.h"

namespace {

inline float silu(float x) { return x / (1.f + std::exp(-x)); }
float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

// sum of a[j] b[j]
float dot(const float* a, const float* b, long count) {
    vec total{};
    long j = 0;
    for (; j + LANES <= count; j += LANES) total += load(a + j) * load(b + j);
    if (j < count) total += load_part(a + j, (int)(count - j)) * load_part(b + j, (int)(count - j));
    return sum(total);
}

// out = x / rms(x) * weight
void norm_row(const float* x, const float* weight, long width, float eps, float* out) {
    const float scale = 1.f / std::sqrt(dot(x, x, width) / (float)width + eps);
    for (long j = 0; j < width; j++) out[j] = x[j] * scale * weight[j];
}

// One channel block of the short convolution and its SiLU; the window moves on by one token.
void convolve(const float* x, float* window, const float* taps, const float* bias, long channels, long reach, long from, long to,
              float* out) {
    for (long c = from; c < to; c++) {
        float y = bias ? bias[c] : 0.f;
        for (long tap = 0; tap < reach; tap++) y += window[tap * channels + c] * taps[tap * channels + c];
        y += x[c] * taps[reach * channels + c];
        out[c] = y;
    }
    for (long tap = 0; tap + 1 < reach; tap++)
        std::memcpy(window + tap * channels + from, window + (tap + 1) * channels + from, (to - from) * sizeof(float));
    std::memcpy(window + (reach - 1) * channels + from, x + from, (to - from) * sizeof(float));
    long c = from;
    for (; c + LANES <= to; c += LANES) store(out + c, load(out + c) * sigmoid(load(out + c)));
    for (; c < to; c++) out[c] = silu(out[c]);
}

constexpr long CHANNELS = 256;  // of the convolution in one task

using namespace skinny;

struct Task {  // one thread of a team
    const int mine = omp_get_thread_num(), of = omp_get_num_threads();
    Rounded rounded;
    std::vector<float> normed, held, o;
};

}  // namespace

struct Weights {  // amor/ops/product/matrix.py: float32 where there are no scales
    const void* weight;
    const float* scales;
    long outputs, inner;
};

struct Mamba2 {
    long heads, size, groups, width, reach;  // size of a head, width of a state, taps - 1
    const float *taps, *bias, *dt_bias, *A, *D, *weight;
    float eps;
};

struct Delta {
    long heads, size, value, reach;  // of a key, of a value, taps - 1
    const float *taps, *dt_bias, *A, *weight;
    float eps;
};

struct Layer {
    const float *norm, *mlp_norm;  // mlp_norm: null without MLP
    float eps, mlp_eps;
    const Mamba2* mamba2;  // one of the two
    const Delta* delta;
    long count;  // of the matrices that feed the mixer, their outputs side by side
    Weights into[6], out, gate, up, down;
    float *window, *state;
};

namespace {

// y (rows `step` apart) = x W^T, or += : this thread's share of the outputs. Others may write theirs at the same time.
// again: x is what the last call had, so that it is rounded once
void multiply(const Weights& m, const float* x, long rows, float* y, long step, bool add, Task& task, bool again = false) {
    const Share share(m.outputs, task.mine, task.of);
    if (m.scales && !again) task.rounded.take(x, rows, m.inner);
    const Rounded& r = task.rounded;
    for (long first = 0; first < rows; first += MOST) {
        const int here = (int)(rows - first < MOST ? rows - first : MOST);
        if (m.scales)
            part(r.against(m.weight, m.scales, first), share.from, share.to, here, y + first * step, step, add);
        else
            part(Floats{(const float*)m.weight, x + first * m.inner, m.inner}, share.from, share.to, here, y + first * step, step, add);
    }
}

// Every thread norms all rows for itself: cheaper than to wait for another.
const float* normed(const float* x, const float* weight, long rows, long width, float eps, Task& task) {
    task.normed.resize(rows * width);
    for (long r = 0; r < rows; r++) norm_row(x + r * width, weight, width, eps, task.normed.data() + r * width);
    return task.normed.data();
}

void convolve_all(const float* x, long step, float* window, const float* taps, const float* bias, long rows, long channels,
                  long reach, float* out) {
    const long blocks = (channels + CHANNELS - 1) / CHANNELS;
#pragma omp for schedule(static)
    for (long task = 0; task < rows * blocks; task++) {
        const long r = task / blocks, from = task % blocks * CHANNELS, to = from + CHANNELS < channels ? from + CHANNELS : channels;
        convolve(x + r * step, window + r * reach * channels, taps, bias, channels, reach, from, to, out + r * channels);
    }
}

// projected [rows, inner + mixed + heads] (z, xBC, dt) -> out [rows, inner], gated and not yet normed
void mamba2(const Mamba2& m, long rows, const float* projected, float* window, float* state, float* xBC, float* out) {
    const long inner = m.heads * m.size, states = m.groups * m.width, mixed = inner + 2 * states, step = inner + mixed + m.heads;
    convolve_all(projected + inner, step, window, m.taps, m.bias, rows, mixed, m.reach, xBC);
#pragma omp for schedule(static)
    for (long task = 0; task < rows * m.heads; task++) {
        const long r = task / m.heads, h = task % m.heads, group = h / (m.heads / m.groups);
        const float* row = projected + r * step;
        const float dt = softplus(row[inner + mixed + h] + m.dt_bias[h]), decay = std::exp(dt * m.A[h]);
        const float* u = xBC + r * mixed + h * m.size;
        const float *B = xBC + r * mixed + inner + group * m.width, *C = B + states;
        float* s = state + task * m.size * m.width;
        for (long p = 0; p < m.size; p++, s += m.width) {
            const float fed = dt * u[p];
            vec y{};
            over(m.width, [&](long j, int n) __attribute__((always_inline)) {
                const vec now = get(s + j, n) * decay + get(B + j, n) * fed;
                put(s + j, now, n);
                y += now * get(C + j, n);
            });
            out[r * inner + h * m.size + p] = (sum(y) + m.D[h] * u[p]) * silu(row[h * m.size + p]);
        }
    }
}

// projected [rows, 2 keys + 2 values + 2 heads] (q, k, v, g, a, b) -> out [rows, values], normed and gated
void delta(const Delta& m, long rows, const float* projected, float* window, float* state, float* qkv, float* out, Task& own) {
    const long keys = m.heads * m.size, values = m.heads * m.value, mixed = 2 * keys + values, step = mixed + values + 2 * m.heads;
    convolve_all(projected, step, window, m.taps, nullptr, rows, mixed, m.reach, qkv);
    own.held.resize(m.value), own.o.resize(m.value);
    float *held = own.held.data(), *o = own.o.data();
#pragma omp for schedule(static)
    for (long task = 0; task < rows * m.heads; task++) {
        const long r = task / m.heads, h = task % m.heads, V = m.value;
        const float *row = projected + r * step, *mine = qkv + r * mixed;
        const float *q = mine + h * m.size, *k = mine + keys + h * m.size, *v = mine + 2 * keys + h * V;
        const float *gate = row + mixed + h * V, *ab = row + mixed + values;
        const float decay = std::exp(m.A[h] * softplus(ab[h] + m.dt_bias[h]));
        const float beta = 1.f / (1.f + std::exp(-ab[m.heads + h]));
        const float unit_q = 1.f / std::sqrt(dot(q, q, m.size) + 1e-6f) / std::sqrt((float)m.size);
        const float unit_k = 1.f / std::sqrt(dot(k, k, m.size) + 1e-6f);
        float* s = state + task * m.size * V;
        for (long j = 0; j < V; j++) held[j] = o[j] = 0;
        for (long i = 0; i < m.size; i++) {
            const float key = k[i] * unit_k * decay;
            for (long j = 0; j < V; j++) held[j] += s[i * V + j] * key;
        }
        for (long j = 0; j < V; j++) held[j] = beta * (v[j] - held[j]);
        for (long i = 0; i < m.size; i++) {
            const float key = k[i] * unit_k, query = q[i] * unit_q;
            for (long j = 0; j < V; j++) {
                const float now = s[i * V + j] * decay + key * held[j];
                s[i * V + j] = now;
                o[j] += query * now;
            }
        }
        float* to = out + r * values + h * V;
        norm_row(o, m.weight, V, m.eps, to);
        for (long j = 0; j < V; j++) to[j] *= silu(gate[j]);
    }
}

// out = silu(gate) up, between two columns
void open(const float* gate, const float* up, long from, long to, float* out) {
    long j = from;
    for (; j + LANES <= to; j += LANES) store(out + j, load(gate + j) * sigmoid(load(gate + j)) * load(up + j));
    for (; j < to; j++) out[j] = silu(gate[j]) * up[j];
}

struct Room {  // what the threads share between two barriers
    std::vector<float> projected, mixed, y;

    void fit(const Layer& layer, long rows) {
        long inputs = 0;
        for (long i = 0; i < layer.count; i++) inputs += layer.into[i].outputs;
        const long wide = inputs > 2 * layer.gate.outputs ? inputs : 2 * layer.gate.outputs;
        grow(projected, rows * wide), grow(mixed, rows * inputs), grow(y, rows * layer.out.inner);
    }
    static void grow(std::vector<float>& v, long size) {
        if ((long)v.size() < size) v.resize(size);
    }
};

// h = mixer(x) or, where add, h += mixer(x); every thread of the team is here
void mix(const Layer& layer, const float* x, long rows, long width, float* h, bool add, Room& room, Task& task) {
    long step = 0, at = 0;
    for (long i = 0; i < layer.count; i++) step += layer.into[i].outputs;
    for (long i = 0; i < layer.count; at += layer.into[i++].outputs)
        multiply(layer.into[i], x, rows, room.projected.data() + at, step, false, task, i > 0);
#pragma omp barrier
    const float* y = room.y.data();
    if (layer.mamba2) {
        mamba2(*layer.mamba2, rows, room.projected.data(), layer.window, layer.state, room.mixed.data(), room.y.data());
        y = normed(y, layer.mamba2->weight, rows, layer.out.inner, layer.mamba2->eps, task);
    } else {
        delta(*layer.delta, rows, room.projected.data(), layer.window, layer.state, room.mixed.data(), room.y.data(), task);
    }
    multiply(layer.out, y, rows, h, width, add, task);
#pragma omp barrier
}

// h += down(silu(gate x) * up x), x = norm(h)
void feed(const Layer& layer, long rows, long width, float* h, Room& room, Task& task) {
    const float* x = normed(h, layer.mlp_norm, rows, width, layer.mlp_eps, task);
    const long wide = layer.gate.outputs;
    float *gate = room.projected.data(), *up = gate + rows * wide;
    multiply(layer.gate, x, rows, gate, wide, false, task);
    multiply(layer.up, x, rows, up, wide, false, task, true);
    const Share share(wide, task.mine, task.of);  // the very columns this thread has just written
    for (long r = 0; r < rows; r++) open(gate + r * wide, up + r * wide, share.from, share.to, gate + r * wide);
#pragma omp barrier
    multiply(layer.down, gate, rows, h, width, true, task);
#pragma omp barrier
}

}  // namespace

extern "C" void norm(const float* x, const float* weight, long rows, long width, float eps, float* out) {
    for (long r = 0; r < rows; r++) norm_row(x + r * width, weight, width, eps, out + r * width);
}

// x [rows, width] by several norms, one after the other; as it is where there is no weight
extern "C" void norms(const float* x, const float* const* weights, const float* eps, long count, long rows, long width, float* out) {
    for (long i = 0; i < count; i++, out += rows * width)
        if (weights[i]) norm(x, weights[i], rows, width, eps[i], out);
        else std::memcpy(out, x, rows * width * sizeof(float));
}

extern "C" void swiglu(const float* both, long rows, long width, float* out) {  // both [rows, 2 width]: gate, up
    for (long r = 0; r < rows; r++) open(both + 2 * r * width, both + (2 * r + 1) * width, 0, width, out + r * width);
}

// h [rows, width] through layers, in place; one team of threads for all of them
extern "C" void walk(const Layer* layers, long count, long rows, long width, float* h, int threads) {
    Room room;
    for (long i = 0; i < count; i++) room.fit(layers[i], rows);
#pragma omp parallel num_threads(threads)
    {
        Task task;
        for (long i = 0; i < count; i++) {
            const Layer& layer = layers[i];
            mix(layer, normed(h, layer.norm, rows, width, layer.eps, task), rows, width, h, true, room, task);
            if (layer.mlp_norm) feed(layer, rows, width, h, room, task);
        }
    }
}

// out [rows, width] = the mixer of one layer alone, of x as it comes
extern "C" void mixed(const Layer* layer, long rows, long width, const float* x, float* out, int threads) {
    Room room;
    room.fit(*layer, rows);
#pragma omp parallel num_threads(threads)
    {
        Task task;
        mix(*layer, x, rows, width, out, false, room, task);
    }
}

struct Slots {  // an attention whose new keys and values are wanted, and where they go: row r, head h at `at[r]`, its numbers dense
    Weights k_proj, v_proj;
    long rows, heads, size, row, head, capacity;
    const float *x, *cos, *sin;  // [rows, inner], [rows, size / 2]
    const int64_t* at;
    float *k, *v;
};

// For several attentions the key, turned, and the value of every row into their slots; gives 0, or 1 and writes nothing where a
// slot is not there
extern "C" int remember(const Slots* every, long count, int threads) {
    std::vector<std::vector<float>> both(count);
    for (long i = 0; i < count; i++) {
        const Slots& to = every[i];
        for (long r = 0; r < to.rows; r++)
            if (to.at[r] < 0 || to.at[r] >= to.capacity) return 1;
        both[i].resize(to.rows * 2 * to.heads * to.size);
    }
#pragma omp parallel num_threads(threads)
    {
        Task task;
        for (long i = 0; i < count; i++) {
            const Slots& to = every[i];
            const long inner = to.heads * to.size;
            multiply(to.k_proj, to.x, to.rows, both[i].data(), 2 * inner, false, task);
            multiply(to.v_proj, to.x, to.rows, both[i].data() + inner, 2 * inner, false, task, true);
        }
#pragma omp barrier
        for (long i = 0; i < count; i++) {
            const Slots& to = every[i];
            const long inner = to.heads * to.size, half = to.size / 2;
#pragma omp for schedule(static) nowait
            for (long j = 0; j < to.rows * to.heads; j++) {
                const long r = j / to.heads, h = j % to.heads, slot = r * to.row + h * to.head + to.at[r] * to.size;
                const float* key = both[i].data() + 2 * r * inner + h * to.size;
                turn_head(key, to.cos + r * half, to.sin + r * half, half, 1.f, to.k + slot);
                std::memcpy(to.v + slot, key + inner, to.size * sizeof(float));
            }
        }
    }
    return 0;
}
