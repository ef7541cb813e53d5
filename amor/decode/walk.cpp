// One token a row through a program: the instructions of amor/program.py, one struct and one function each.
// All threads walk the program together and wait for each other after every instruction. What an instruction computes is the
// one-token kernel of its operator (ops/<op>/step.h). A row is computed by itself: its bits do not depend on the other rows.
#include <type_traits>

#include "attend/step.h"
#include "conv/step.h"
#include "delta/step.h"
#include "gated_norm/step.h"
#include "layout.h"
#include "rowwise/step.h"
#include "scan/step.h"
#include "skinny.h"
#include "team.h"
#include "turn.h"

struct Vector {  // numbers [rows, width] inside a register [rows, of]
    long where, offset, of, start, width;  // where: -1 in the room, `offset` numbers a row from its beginning; else handed in
};

struct Held {  // a tensor of the state: window or recurrent state, dense; or keys and values of a row and head at row, head
    float *p, *v;
    const float *cos, *sin;  // [rows of the batch, size / 2] of each row's position
    long row, head, capacity;
};

struct Call {
    long rows;
    float* room;
    float* const* given;
    const Held* held;
    const int64_t *row, *at;  // of each row: its row in the state, and its position
};

// Fields in the order of amor/program.py; a held tensor is its place in Call::held, layers are matrices and their count.
struct Product { enum { kind = 0 }; Vector x, out; long add; const skinny::Weights* layers; long count; };
struct Norm { enum { kind = 1 }; Vector x, out; const float* weight; long size; float eps; };
struct GatedNorm { enum { kind = 2 }; Vector x, z, out; const float* weight; long size, gate_first; float eps; };
struct Gate { enum { kind = 3 }; Vector x, z, out; long act; };
struct Add { enum { kind = 4 }; Vector x, y, out; const float* scale; };
struct Conv { enum { kind = 5 }; Vector x, out; const float *taps, *bias; long window, reach; };
struct Scan { enum { kind = 6 }; Vector u, dt, B, C, out; const float *A, *D, *dt_bias; long state, heads, size, groups, states; };
struct Delta { enum { kind = 7 }; Vector q, k, v, a, b, out; const float *A, *dt_bias; long state, heads, size, value, rates; };
struct Keys { enum { kind = 8 }; Vector k, v; long kv, heads, size; };
struct Attend { enum { kind = 9 }; Vector q, out; long kv, heads, size; };
struct Dot { enum { kind = 10 }; Vector x, out; const float *weight, *bias; };
struct SiluDot { enum { kind = 11 }; Vector x, out; const float *bias, *weight; };
struct Step { long kind; const void* what; };

namespace {

using skinny::Weights;

float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

constexpr long CHANNELS = 256;  // of one task

struct Thread {  // one of a team
    const Call& call;
    const int mine, of;
    skinny::Ready ready;
    std::vector<float> room;

    float* at(const Vector& v, long row) const {
        float* base = v.where < 0 ? call.room + v.offset * call.rows : call.given[v.where];
        return base + row * v.of + v.start;
    }
    float* own(long numbers) {
        if ((long)room.size() < numbers) room.resize(numbers);
        return room.data();
    }
    // body(row, unit) for this thread's share of all rows and units
    template <class Body>
    void each(long units, Body body) const {
        const long all = call.rows * units;
        for (long i = all * mine / of; i < all * (mine + 1) / of; i++) body(i / units, i % units);
    }
    // body(row, from, to) for this thread's share of all rows and columns
    template <class Body>
    void columns(long width, Body body) const {
        each((width + CHANNELS - 1) / CHANNELS, [&](long r, long block) {
            body(r, block * CHANNELS, block * CHANNELS + CHANNELS < width ? block * CHANNELS + CHANNELS : width);
        });
    }

    void run(const Product& s) {
        float* out = at(s.out, 0);
        long rounded = -1;  // the format x is ready for
        for (long i = 0; i < s.count; out += s.layers[i++].outputs) {
            const skinny::Weights& m = s.layers[i];
            const skinny::Share share(m.outputs, mine, of);
            if (share.from == share.to) continue;
            if (rounded != m.format) ready.take(m, at(s.x, 0), s.x.of, call.rows), rounded = m.format;
            ready.against(m, [&](const auto& kind) { part(kind, share.from, share.to, call.rows, out, s.out.of, s.add); });
        }
    }

    void run(const Norm& s) {
        each(s.x.width / s.size, [&](long r, long i) {
            norm_row(at(s.x, r) + i * s.size, s.weight, s.size, s.eps, at(s.out, r) + i * s.size);
        });
    }

    void run(const GatedNorm& s) {
        each(s.x.width / s.size, [&](long r, long i) {
            const float *x = at(s.x, r) + i * s.size, *z = at(s.z, r) + i * s.size;
            (s.gate_first ? gated_norm_row<true> : gated_norm_row<false>)(x, z, s.weight, s.size, s.eps, at(s.out, r) + i * s.size);
        });
    }

    void run(const Gate& s) {
        columns(s.x.width, [&](long r, long from, long to) {
            if (s.act == 0) return swiglu_row(at(s.z, r), at(s.x, r), from, to, at(s.out, r));
            const float *x = at(s.x, r) + from, *z = at(s.z, r) + from;
            float* out = at(s.out, r) + from;
            over(to - from, [&](long j, int n) { put(out + j, get(x + j, n) * sigmoid(get(z + j, n)), n); });
        });
    }

    void run(const Add& s) {
        columns(s.x.width, [&](long r, long from, long to) {
            const float *x = at(s.x, r) + from, *y = at(s.y, r) + from, *scale = s.scale ? s.scale + from : nullptr;
            float* out = at(s.out, r) + from;
            over(to - from, [&](long j, int n) {
                put(out + j, get(x + j, n) + (scale ? get(scale + j, n) * get(y + j, n) : get(y + j, n)), n);
            });
        });
    }

    void run(const Conv& s) {
        const long width = s.x.width;
        columns(width, [&](long r, long from, long to) {
            float* window = call.held[s.window].p + r * s.reach * width;
            conv_token(at(s.x, r), s.taps, s.bias, window, window, width, s.reach, from, to, at(s.out, r));
        });
    }

    void run(const Scan& s) {
        each(s.heads, [&](long r, long h) {
            const float dt = softplus(at(s.dt, r)[h] + s.dt_bias[h]);
            const long group = h / (s.heads / s.groups) * s.states;
            float* state = call.held[s.state].p + (r * s.heads + h) * s.size * s.states;
            scan_token(at(s.u, r) + h * s.size, dt, std::exp(dt * s.A[h]), at(s.B, r) + group, at(s.C, r) + group, s.D[h], s.size,
                       s.states, state, state, at(s.out, r) + h * s.size);
        });
    }

    void run(const Delta& s) {
        float *u = own(s.value + s.rates), *decay = u + s.value;
        each(s.heads, [&](long r, long h) {
            for (long i = 0; i < s.rates; i++) {
                const long j = h * s.rates + i;
                decay[i] = std::exp(s.A[h] * softplus(at(s.a, r)[j] + s.dt_bias[j]));
            }
            const float beta = 1.f / (1.f + std::exp(-at(s.b, r)[h]));
            float* state = call.held[s.state].p + (r * s.heads + h) * s.size * s.value;
            delta_token(at(s.q, r) + h * s.size, at(s.k, r) + h * s.size, at(s.v, r) + h * s.value, decay, s.rates > 1, beta, s.size,
                        s.value, state, state, at(s.out, r) + h * s.value, u);
        });
    }

    void run(const Keys& s) {
        const Held& kv = call.held[s.kv];
        const long half = s.size / 2;
        each(s.heads, [&](long r, long h) {
            const long slot = call.row[r] * kv.row + h * kv.head + call.at[r] * s.size;
            turn_head(at(s.k, r) + h * s.size, kv.cos + call.row[r] * half, kv.sin + call.row[r] * half, half, 1.f, kv.p + slot);
            std::memcpy(kv.v + slot, at(s.v, r) + h * s.size, s.size * sizeof(float));
        });
    }

    void run(const Dot& s) {
        each(1, [&](long r, long) {
            *at(s.out, r) = attention::dot(at(s.x, r), s.weight, s.x.width) + (s.bias ? *s.bias : 0.f);
        });
    }

    void run(const SiluDot& s) {
        each(1, [&](long r, long) { *at(s.out, r) += silu_dot(at(s.x, r), s.bias, s.weight, s.x.width); });
    }

    void run(const Attend& s) {
        using namespace attention;
        const Held& kv = call.held[s.kv];
        const long half = s.size / 2, width = part_size(s.size);
        const float scale = 1.f / std::sqrt((float)s.size);
        each(s.heads, [&](long r, long h) {
            const long keys = call.at[r] + 1, begin = call.row[r] * kv.row + h * kv.head;
            float *q = own(s.size + slabs(keys) * width), *parts = q + s.size;
            turn_head(at(s.q, r) + h * s.size, kv.cos + call.row[r] * half, kv.sin + call.row[r] * half, half, 1.f, q);
            for (long i = 0; i < slabs(keys); i++) {
                const long from = i * SLAB, count = keys - from < SLAB ? keys - from : SLAB;
                slab(q, kv.p + begin + from * s.size, kv.v + begin + from * s.size, count, s.size, scale, parts + i * width);
            }
            join(parts, slabs(keys), s.size, at(s.out, r) + h * s.size);
        });
    }
};

// work(instruction), with its own type
template <class Work>
void as_it_is(const Step& step, Work work) {
    switch (step.kind) {
        case Product::kind: return work(*(const Product*)step.what);
        case Norm::kind: return work(*(const Norm*)step.what);
        case GatedNorm::kind: return work(*(const GatedNorm*)step.what);
        case Gate::kind: return work(*(const Gate*)step.what);
        case Add::kind: return work(*(const Add*)step.what);
        case Conv::kind: return work(*(const Conv*)step.what);
        case Scan::kind: return work(*(const Scan*)step.what);
        case Delta::kind: return work(*(const Delta*)step.what);
        case Keys::kind: return work(*(const Keys*)step.what);
        case Attend::kind: return work(*(const Attend*)step.what);
        case Dot::kind: return work(*(const Dot*)step.what);
        case SiluDot::kind: return work(*(const SiluDot*)step.what);
    }
}

// Whether every row's position has a slot among the keys it writes or reads.
bool fits(const Step& step, const Call& call) {
    bool there = true;
    as_it_is(step, [&](const auto& s) {
        using Kind = std::decay_t<decltype(s)>;
        if constexpr (std::is_same_v<Kind, Keys> || std::is_same_v<Kind, Attend>)
            for (long r = 0; r < call.rows; r++) there &= call.at[r] >= 0 && call.at[r] < call.held[s.kv].capacity;
    });
    return there;
}

}  // namespace

// Gives 0, or 1 and does nothing where a slot is not there.
extern "C" int walk(const Step* steps, long count, const Call* call, int threads) {
    for (long i = 0; i < count; i++)
        if (!fits(steps[i], *call)) return 1;
    expect_more();
    together(threads, [&](Member me) {
        Thread thread{*call, me.mine, me.of};
        for (long i = 0; i < count; i++) {
            as_it_is(steps[i], [&](const auto& s) { thread.run(s); });
            if (i + 1 < count) me.wait();
        }
    });
    return 0;
}

LAYOUT(STRUCT(Vector, where, offset, of, start, width)
       STRUCT(Held, p, v, cos, sin, row, head, capacity)
       STRUCT(Call, rows, room, given, held, row, at)
       STRUCT(Step, kind, what)
       STRUCT(Weights, weight, scales, outputs, inner, format)
       STRUCT(Product, x, out, add, layers, count)
       STRUCT(Norm, x, out, weight, size, eps)
       STRUCT(GatedNorm, x, z, out, weight, size, gate_first, eps)
       STRUCT(Gate, x, z, out, act)
       STRUCT(Add, x, y, out, scale)
       STRUCT(Conv, x, out, taps, bias, window, reach)
       STRUCT(Scan, u, dt, B, C, out, A, D, dt_bias, state, heads, size, groups, states)
       STRUCT(Delta, q, k, v, a, b, out, A, dt_bias, state, heads, size, value, rates)
       STRUCT(Keys, k, v, kv, heads, size)
       STRUCT(Attend, q, out, kv, heads, size)
       STRUCT(Dot, x, out, weight, bias)
       STRUCT(SiluDot, x, out, bias, weight)
       NUMBER(Product.kind, Product::kind)
       NUMBER(Norm.kind, Norm::kind)
       NUMBER(GatedNorm.kind, GatedNorm::kind)
       NUMBER(Gate.kind, Gate::kind)
       NUMBER(Add.kind, Add::kind)
       NUMBER(Conv.kind, Conv::kind)
       NUMBER(Scan.kind, Scan::kind)
       NUMBER(Delta.kind, Delta::kind)
       NUMBER(Keys.kind, Keys::kind)
       NUMBER(Attend.kind, Attend::kind)
       NUMBER(Dot.kind, Dot::kind)
       NUMBER(SiluDot.kind, SiluDot::kind))
