// The short causal convolution and its SiLU, forward and backward, a row of channels at a time.
// Letters: rows, length T, channels C, taps k; weight lies as [k, C] here, so that a tap is a row of channels.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "conv/step.h"
#include "lanes.h"
#include "layout.h"

struct Shape {
    long rows, length, channels, taps, block;  // block: tokens whose share of the weight's gradient is one partial sum
    long blocks() const { return (length + block - 1) / block; }
};

struct Inputs {  // strides count floats; channels are dense
    const float *x, *weight, *bias, *window;
    const long* start;  // [rows, length] the column where a token's document begins; before the call's start: -taps. May be null
    long x_row, x_token;
};

// The input under tap j of token t, or null where the document had not begun.
static const float* under(const Shape& d, const Inputs& in, long row, long t, long j) {
    const long reach = d.taps - 1, at = t - reach + j;
    if (in.start && at < in.start[row * d.length + t]) return nullptr;
    if (at >= 0) return in.x + row * in.x_row + at * in.x_token;
    return in.window ? in.window + (row * reach + reach + at) * d.channels : nullptr;
}

constexpr long MAX_TAPS = 64;

struct Taps {  // the taps of one token that see something
    int count = 0;
    const float *x[MAX_TAPS], *w[MAX_TAPS];
    Taps(const Shape& d, const Inputs& in, long row, long t) {
        for (long j = 0; j < d.taps; j++)
            if (const float* p = under(d, in, row, t, j)) x[count] = p, w[count++] = in.weight + j * d.channels;
    }
    vec sum(const float* bias, long c, int n) const {
        vec y = bias ? get(bias + c, n) : vec{};
        if (count == 4 && n == LANES) {  // the usual number, as a constant for the compiler
            for (int j = 0; j < 4; j++) y += load(x[j] + c) * load(w[j] + c);
            return y;
        }
        for (int j = 0; j < count; j++) y += get(x[j] + c, n) * get(w[j] + c, n);
        return y;
    }
};

extern "C" void conv_forward(const Shape* d, const Inputs* in, float* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < d->rows * d->length; i++) {
        const Taps taps(*d, *in, i / d->length, i % d->length);
        over(d->channels, [&](long c, int n) {
            const vec s = taps.sum(in->bias, c, n);
            put(y + i * d->channels + c, s * sigmoid(s), n);
        });
    }
}

// The gradient before the SiLU, of one token; its share of the weight's and bias's gradients is added to dw [k + 1, C] where given.
static void before_silu(const Shape& d, const Inputs& in, long row, long t, const float* dy, float* g, float* dw) {
    const Taps taps(d, in, row, t);
    const long C = d.channels;
    over(C, [&](long c, int n) {
        const vec s = taps.sum(in.bias, c, n), open = sigmoid(s);
        const vec mine = get(dy + c, n) * open * (1.f + s * (1.f - open));
        put(g + c, mine, n);
        if (!dw) return;
        for (int j = 0; j < taps.count; j++) {
            float* sum = dw + (taps.w[j] - in.weight) + c;
            put(sum, get(sum, n) + mine * get(taps.x[j] + c, n), n);
        }
        put(dw + d.taps * C + c, get(dw + d.taps * C + c, n) + mine, n);
    });
}

// dweight [rows, blocks, k + 1, C] partial sums, the bias last. A block keeps the gradients before the SiLU of k tokens and
// finds those of the k - 1 after it once more: they never go through memory.
extern "C" void conv_backward(const Shape* d, const Inputs* in, const float* dy, float* dx, float* dweight, float* dwindow,
                              int threads) {
    const long C = d->channels, T = d->length, k = d->taps, reach = k - 1;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> ring(k * C);
#pragma omp for schedule(static)
        for (long i = 0; i < d->rows * d->blocks(); i++) {
            const long row = i / d->blocks(), from = i % d->blocks() * d->block, to = std::min(T, from + d->block);
            const long first = from || !dwindow ? from : -reach, end = std::min(T, to + reach);
            float* dw = dweight + i * (k + 1) * C;
            std::fill(dw, dw + (k + 1) * C, 0.f);
            // the input at column t (or before the call, t < 0) was under tap j of token t + reach - j
            const auto emit = [&](long t) {
                float* out = t >= 0 ? dx + (row * T + t) * C : dwindow + (row * reach + reach + t) * C;
                const float *g[MAX_TAPS], *w[MAX_TAPS];
                int count = 0;
                for (long j = 0; j < k; j++) {
                    const long later = t + reach - j;
                    if (later < 0 || later >= T || (in->start && t < in->start[row * T + later])) continue;
                    g[count] = &ring[later % k * C], w[count++] = in->weight + j * C;
                }
                over(C, [&](long c, int n) {
                    vec s{};
                    for (int j = 0; j < count; j++) s += get(g[j] + c, n) * get(w[j] + c, n);
                    put(out + c, s, n);
                });
            };
            for (long t = from; t < end; t++) {
                before_silu(*d, *in, row, t, dy + (row * T + t) * C, &ring[t % k * C], t < to ? dw : nullptr);
                if (t - reach >= first) emit(t - reach);
            }
            for (long t = std::max(first, end - reach); t < to; t++) emit(t);
        }
    }
}

// One token a row; window and after [rows, k - 1, C] may be the same.
extern "C" void conv_step(const Shape* d, const Inputs* in, float* y, float* after) {
    const long C = d->channels, reach = d->taps - 1, held = reach * C;
    for (long r = 0; r < d->rows; r++)
        conv_token(in->x + r * in->x_row, in->weight, in->bias, in->window + r * held, after + r * held, C, reach, 0, C, y + r * C);
}

LAYOUT(STRUCT(Shape, rows, length, channels, taps, block)
       STRUCT(Inputs, x, weight, bias, window, start, x_row, x_token)
       NUMBER(MAX_TAPS, MAX_TAPS))
