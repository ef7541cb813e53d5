// One token a row through the parts of a layer that are not products: convolution, recurrences, norms, gates.
// States are updated in place. A row is computed by itself: its bits do not depend on the other rows.
#include <cmath>
#include <vector>

#include "lanes.h"

namespace {

float silu(float x) { return x / (1.f + std::exp(-x)); }
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

}  // namespace

extern "C" void norm(const float* x, const float* weight, long rows, long width, float eps, float* out) {
    for (long r = 0; r < rows; r++) norm_row(x + r * width, weight, width, eps, out + r * width);
}

extern "C" void swiglu(const float* both, long rows, long width, float* out) {  // both [rows, 2 width]: gate, up
    for (long r = 0; r < rows; r++) {
        const float *gate = both + 2 * r * width, *up = gate + width;
        float* to = out + r * width;
        long j = 0;
        for (; j + LANES <= width; j += LANES) store(to + j, load(gate + j) * sigmoid(load(gate + j)) * load(up + j));
        for (; j < width; j++) to[j] = silu(gate[j]) * up[j];
    }
}

struct Mamba2 {
    long rows, heads, size, groups, width, reach;  // size of a head, width of a state, taps - 1
    const float *taps, *bias, *dt_bias, *A, *D, *weight;
    float eps;
};

// projected [rows, inner + mixed + heads] (z, xBC, dt) -> out [rows, inner], normed and gated
extern "C" void mamba2(const Mamba2* m, const float* projected, float* window, float* state, float* out, int threads) {
    const long inner = m->heads * m->size, states = m->groups * m->width, mixed = inner + 2 * states;
    const long step = inner + mixed + m->heads, blocks = (mixed + CHANNELS - 1) / CHANNELS;
    std::vector<float> xBC(m->rows * mixed);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long task = 0; task < m->rows * blocks; task++) {
            const long r = task / blocks, from = task % blocks * CHANNELS, to = from + CHANNELS < mixed ? from + CHANNELS : mixed;
            convolve(projected + r * step + inner, window + r * m->reach * mixed, m->taps, m->bias, mixed, m->reach, from, to,
                     xBC.data() + r * mixed);
        }
#pragma omp for schedule(static)
        for (long task = 0; task < m->rows * m->heads; task++) {
            const long r = task / m->heads, h = task % m->heads, group = h / (m->heads / m->groups);
            const float* row = projected + r * step;
            const float dt = softplus(row[inner + mixed + h] + m->dt_bias[h]), decay = std::exp(dt * m->A[h]);
            const float* u = xBC.data() + r * mixed + h * m->size;
            const float *B = xBC.data() + r * mixed + inner + group * m->width, *C = B + states;
            float* s = state + task * m->size * m->width;
            for (long p = 0; p < m->size; p++, s += m->width) {
                const float fed = dt * u[p];
                vec y{};
                long j = 0;
                for (; j + LANES <= m->width; j += LANES) {
                    const vec now = load(s + j) * decay + load(B + j) * fed;
                    store(s + j, now);
                    y += now * load(C + j);
                }
                if (const int left = (int)(m->width - j)) {
                    const vec now = load_part(s + j, left) * decay + load_part(B + j, left) * fed;
                    store_part(s + j, now, left);
                    y += now * load_part(C + j, left);
                }
                out[r * inner + h * m->size + p] = (sum(y) + m->D[h] * u[p]) * silu(row[h * m->size + p]);
            }
        }
#pragma omp for schedule(static)
        for (long r = 0; r < m->rows; r++) norm_row(out + r * inner, m->weight, inner, m->eps, out + r * inner);
    }
}

struct Delta {
    long rows, heads, size, value, reach;  // of a key, of a value, taps - 1
    const float *taps, *dt_bias, *A, *weight;
    float eps;
};

// projected [rows, 2 keys + 2 values + 2 heads] (q, k, v, g, a, b) -> out [rows, values], normed and gated
extern "C" void delta(const Delta* m, const float* projected, float* window, float* state, float* out, int threads) {
    const long keys = m->heads * m->size, values = m->heads * m->value, mixed = 2 * keys + values;
    const long step = mixed + values + 2 * m->heads, blocks = (mixed + CHANNELS - 1) / CHANNELS;
    std::vector<float> qkv(m->rows * mixed);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> held(m->value), o(m->value);
#pragma omp for schedule(static)
        for (long task = 0; task < m->rows * blocks; task++) {
            const long r = task / blocks, from = task % blocks * CHANNELS, to = from + CHANNELS < mixed ? from + CHANNELS : mixed;
            convolve(projected + r * step, window + r * m->reach * mixed, m->taps, nullptr, mixed, m->reach, from, to,
                     qkv.data() + r * mixed);
        }
#pragma omp for schedule(static)
        for (long task = 0; task < m->rows * m->heads; task++) {
            const long r = task / m->heads, h = task % m->heads, V = m->value;
            const float *row = projected + r * step, *mine = qkv.data() + r * mixed;
            const float *q = mine + h * m->size, *k = mine + keys + h * m->size, *v = mine + 2 * keys + h * V;
            const float *gate = row + mixed + h * V, *ab = row + mixed + values;
            const float decay = std::exp(m->A[h] * softplus(ab[h] + m->dt_bias[h]));
            const float beta = 1.f / (1.f + std::exp(-ab[m->heads + h]));
            const float unit_q = 1.f / std::sqrt(dot(q, q, m->size) + 1e-6f) / std::sqrt((float)m->size);
            const float unit_k = 1.f / std::sqrt(dot(k, k, m->size) + 1e-6f);
            float* s = state + task * m->size * V;
            for (long j = 0; j < V; j++) held[j] = o[j] = 0;
            for (long i = 0; i < m->size; i++) {
                const float key = k[i] * unit_k * decay;
                for (long j = 0; j < V; j++) held[j] += s[i * V + j] * key;
            }
            for (long j = 0; j < V; j++) held[j] = beta * (v[j] - held[j]);
            for (long i = 0; i < m->size; i++) {
                const float key = k[i] * unit_k, query = q[i] * unit_q;
                for (long j = 0; j < V; j++) {
                    const float now = s[i * V + j] * decay + key * held[j];
                    s[i * V + j] = now;
                    o[j] += query * now;
                }
            }
            float* to = out + r * values + h * V;
            norm_row(o.data(), m->weight, V, m->eps, to);
            for (long j = 0; j < V; j++) to[j] *= silu(gate[j]);
        }
    }
}
