// One token per row through a program: the instructions of amor/program.py, one struct and one function each.
// All threads walk the program together and wait for each other after every instruction. What an instruction computes is the
// one-token kernel of its operator (ops/<op>/step.h). A row is computed by itself: its bits do not depend on the other rows.
#include <type_traits>

#include "attend/step.h"
#include "conv/step.h"
#include "delta/step.h"
#include "product/facts.h"
#include "gated_norm/step.h"
#include "layout.h"
#include "rowwise/step.h"
#include "scan/step.h"
#include "skinny.h"
#include "team.h"
#include "turn.h"

struct Vector {  // numbers [rows, width], `offset` numbers into rows of row_stride numbers
    // buffer: -1: scratch memory, beginning scratch_offset * rows numbers into it; else an input by its index
    long buffer, scratch_offset, row_stride, offset, width;
};

struct StateTensor {  // of every row: a recurrent tensor before and after the token; or keys and values [heads, capacity, size]
    float* const* before;  // or keys
    float* const* after;   // may be `before`; or values
    const float *cos, *sin;  // [positions, size / 2]
    const int64_t* capacity;
};

struct Call {
    long rows;  // one token each
    float* scratch;
    float* const* inputs;
    const StateTensor* state;
    const int64_t *row, *position;  // of each row: its index in the tables of the state, and the position of its token
    const int64_t* chains;  // [chain_count + 1] first rows of chains: consecutive tokens of one text; null: every row is one
    long chain_count;
    float *logits, *entropy;  // of a program with HeadOps: [rows, vocabulary] and [rows], of the last column
    int64_t* counts;  // passes over the head, and vectors it read
    char* fired;      // [rows, blocks]
    long blocks;
    const int64_t* widths;  // of every input
    long input_count, scratch_size;  // scratch numbers per row
    long speculate;  // whether the blocks after one that fired are run ahead as if they fired too
};

// Fields in the order of amor/program.py; a state tensor is its index in Call::state, layers are matrices and their count.
struct ProductOp { enum { kind = 0 }; Vector x, out; long add; const skinny::Weights* layers; long count; };
struct NormOp { enum { kind = 1 }; Vector x, out; const float* weight; long size; float eps; };
struct GatedNormOp { enum { kind = 2 }; Vector x, z, out; const float* weight; long size, gate_first; float eps; };
struct GateOp { enum { kind = 3 }; Vector x, z, out; long act; };
struct AddOp { enum { kind = 4 }; Vector x, y, out; const float* scale; };
struct ConvOp { enum { kind = 5 }; Vector x, out; const float *taps, *bias; long window, reach; };
struct ScanOp { enum { kind = 6 }; Vector u, dt, B, C, out; const float *A, *D, *dt_bias; long state, heads, size, groups, states; };
struct DeltaOp { enum { kind = 7 }; Vector q, k, v, a, b, out; const float *A, *dt_bias; long state, heads, size, value, rates; };
struct KeysOp { enum { kind = 8 }; Vector k, v; long kv, heads, size; };
struct AttendOp { enum { kind = 9 }; Vector q, out; long kv, heads, size; };
struct DotOp { enum { kind = 10 }; Vector x, out; const float *weight, *bias; };
struct SiluDotOp { enum { kind = 11 }; Vector x, out; const float *bias, *weight; };
struct Instruction { long kind; const void* fields; };
// Columns of the residual are numbered; a reading is that of a column, a row and the row's residual version.
struct HeadOp {
    enum { kind = 12 };
    Vector h, out;
    long column, last, stat, count;  // columns that one pass may read: this one and later ones
    float shift, divisor;            // out = shift + stat / divisor
    long most;                       // vectors of a pass that cost little more than one
    const float *columns, *norms, *eps;  // [count]: their numbers; [count, width]; eps < 0: no norm
    const skinny::Weights* layers;
    long layers_count;
};
struct FireOp {  // body: from inputs h, x to the residual after the block, for rows that fire
    enum { kind = 13 };
    Vector h, x, score, threshold, given, fire;
    long scratch;  // numbers per row of the body
    const Instruction* body;
    long length;
};

namespace {

using skinny::Weights;

float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

constexpr long CHANNELS = 256;  // of one task
enum { ENTROPY, MARGIN };      // statistics of a HeadOp

// What the threads of a step share: readings of the head by column, residual version and row, memory of rows that fire, and of
// later blocks that were run ahead for them.
struct Shared {
    long rows = 0, columns = 0;
    std::vector<long> versions, logits_of;  // [rows] residual version; the version whose logits are in Call::logits
    std::vector<char> known;     // [columns, versions, rows] whether it was read
    std::vector<float> stats;    // [columns, versions, rows, STATS]
    std::vector<float> vectors;  // read by one pass
    std::vector<facts::Facts> slabs;  // [vectors, slabs]
    std::vector<float> h, x, after, scratch;
    std::vector<int64_t> row, position;
    std::vector<char> ahead;  // [rows] whether the row fired at every block since it was run ahead
    std::vector<float> ahead_after, ahead_scratch;  // [blocks, rows, width] residuals after blocks that were run ahead
    std::vector<std::vector<float>> ahead_inputs;

    void fit(const HeadOp& s, long of) {
        rows = of, columns = s.last + 1;
        versions.resize(rows), logits_of.assign(rows, -1);
        known.assign(columns * columns * rows, 0), stats.resize(columns * columns * rows * facts::STATS);
        const size_t most = rows > s.most ? rows : s.most, all = most * ((s.layers->outputs + facts::SLAB - 1) / facts::SLAB);
        if (vectors.size() < most * s.h.width) vectors.resize(most * s.h.width);
        if (slabs.size() < all) slabs.resize(all);
    }
    void fit(const FireOp& s, long of) {
        versions.resize(of), row.resize(of), position.resize(of), ahead.resize(of);
        h.resize(of * s.h.width), x.resize(of * s.h.width), after.resize(of * s.h.width);
        if ((long)scratch.size() < of * s.scratch) scratch.resize(of * s.scratch);
    }
    void fit(const Call& call, long blocks, long width) {
        ahead_after.resize(blocks * call.rows * width), ahead_scratch.resize(call.rows * call.scratch_size);
        for (long i = 0; i < call.input_count; i++) ahead_inputs.emplace_back(call.rows * call.widths[i]);
    }
    long key(long column, long version, long row) const { return (column * columns + version) * rows + row; }
};

struct Reading {  // of one vector by the head
    long column, version, row;
};

template <class Work>
void dispatch(const Instruction& step, Work work);

struct Thread {  // one of a team
    const Call& call;
    const Member& me;
    Shared& shared;
    const int mine = me.mine, of = me.of;
    const Instruction *next = nullptr, *end = nullptr;  // the instructions after this one
    long block = 0;                                     // FireOps so far
    skinny::Ready ready;
    std::vector<float> workspace;

    float* at(const Vector& v, long row) const {
        float* base = v.buffer < 0 ? call.scratch + v.scratch_offset * call.rows : call.inputs[v.buffer];
        return base + row * v.row_stride + v.offset;
    }
    float* own(long numbers) {
        if ((long)workspace.size() < numbers) workspace.resize(numbers);
        return workspace.data();
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

    // body(row, unit) for this thread's share of chains and units; the tokens of a chain one after the other
    template <class Body>
    void each_in_order(long units, Body body) const {
        const long chains = call.chains ? call.chain_count : call.rows, all = chains * units;
        for (long i = all * mine / of; i < all * (mine + 1) / of; i++) {
            const long chain = i / units;
            for (long r = call.chains ? call.chains[chain] : chain; r < (call.chains ? call.chains[chain + 1] : chain + 1); r++)
                body(r, i % units);
        }
    }

    void run(const ProductOp& s) {
        float* out = at(s.out, 0);
        long rounded = -1;  // the format x is ready for
        for (long i = 0; i < s.count; out += s.layers[i++].outputs) {
            const skinny::Weights& m = s.layers[i];
            const skinny::Share share(m.outputs, mine, of);
            if (share.from == share.to) continue;
            if (rounded != m.format) ready.take(m, at(s.x, 0), s.x.row_stride, call.rows), rounded = m.format;
            ready.against(m, [&](const auto& kind) { part(kind, share.from, share.to, call.rows, out, s.out.row_stride, s.add); });
        }
    }

    void run(const NormOp& s) {
        each(s.x.width / s.size, [&](long r, long i) {
            norm_row(at(s.x, r) + i * s.size, s.weight, s.size, s.eps, at(s.out, r) + i * s.size);
        });
    }

    void run(const GatedNormOp& s) {
        each(s.x.width / s.size, [&](long r, long i) {
            const float *x = at(s.x, r) + i * s.size, *z = at(s.z, r) + i * s.size;
            (s.gate_first ? gated_norm_row<true> : gated_norm_row<false>)(x, z, s.weight, s.size, s.eps, at(s.out, r) + i * s.size);
        });
    }

    void run(const GateOp& s) {
        columns(s.x.width, [&](long r, long from, long to) {
            if (s.act == 0) return swiglu_row(at(s.z, r), at(s.x, r), from, to, at(s.out, r));
            const float *x = at(s.x, r) + from, *z = at(s.z, r) + from;
            float* out = at(s.out, r) + from;
            over(to - from, [&](long j, int n) { put(out + j, get(x + j, n) * sigmoid(get(z + j, n)), n); });
        });
    }

    void run(const AddOp& s) {
        columns(s.x.width, [&](long r, long from, long to) {
            const float *x = at(s.x, r) + from, *y = at(s.y, r) + from, *scale = s.scale ? s.scale + from : nullptr;
            float* out = at(s.out, r) + from;
            over(to - from, [&](long j, int n) {
                put(out + j, get(x + j, n) + (scale ? get(scale + j, n) * get(y + j, n) : get(y + j, n)), n);
            });
        });
    }

    void run(const ConvOp& s) {
        const StateTensor& window = call.state[s.window];
        const long width = s.x.width;
        each_in_order((width + CHANNELS - 1) / CHANNELS, [&](long r, long block) {
            const long from = block * CHANNELS, to = from + CHANNELS < width ? from + CHANNELS : width, i = call.row[r];
            conv_token(at(s.x, r), s.taps, s.bias, window.before[i], window.after[i], width, s.reach, from, to, at(s.out, r));
        });
    }

    void run(const ScanOp& s) {
        const StateTensor& state = call.state[s.state];
        each_in_order(s.heads, [&](long r, long h) {
            const float dt = softplus(at(s.dt, r)[h] + s.dt_bias[h]);
            const long group = h / (s.heads / s.groups) * s.states, offset = h * s.size * s.states, i = call.row[r];
            scan_token(at(s.u, r) + h * s.size, dt, std::exp(dt * s.A[h]), at(s.B, r) + group, at(s.C, r) + group, s.D[h], s.size,
                       s.states, state.before[i] + offset, state.after[i] + offset, at(s.out, r) + h * s.size);
        });
    }

    void run(const DeltaOp& s) {
        float *u = own(s.value + s.rates), *decay = u + s.value;
        const StateTensor& state = call.state[s.state];
        each_in_order(s.heads, [&](long r, long h) {
            for (long i = 0; i < s.rates; i++) {
                const long j = h * s.rates + i;
                decay[i] = std::exp(s.A[h] * softplus(at(s.a, r)[j] + s.dt_bias[j]));
            }
            const float beta = 1.f / (1.f + std::exp(-at(s.b, r)[h]));
            const long offset = h * s.size * s.value, i = call.row[r];
            delta_token(at(s.q, r) + h * s.size, at(s.k, r) + h * s.size, at(s.v, r) + h * s.value, decay, s.rates > 1, beta, s.size,
                        s.value, state.before[i] + offset, state.after[i] + offset, at(s.out, r) + h * s.value, u);
        });
    }

    void run(const KeysOp& s) {
        const StateTensor& kv = call.state[s.kv];
        const long half = s.size / 2;
        each(s.heads, [&](long r, long h) {
            const long i = call.row[r], slot = (h * kv.capacity[i] + call.position[r]) * s.size;
            turn_head(at(s.k, r) + h * s.size, kv.cos + call.position[r] * half, kv.sin + call.position[r] * half, half, 1.f, kv.before[i] + slot);
            std::memcpy(kv.after[i] + slot, at(s.v, r) + h * s.size, s.size * sizeof(float));
        });
    }

    void run(const DotOp& s) {
        each(1, [&](long r, long) {
            *at(s.out, r) = attention::dot(at(s.x, r), s.weight, s.x.width) + (s.bias ? *s.bias : 0.f);
        });
    }

    void run(const SiluDotOp& s) {
        each(1, [&](long r, long) { *at(s.out, r) += silu_dot(at(s.x, r), s.bias, s.weight, s.x.width); });
    }

    // The statistic of every row's current residual: rows that were not read yet are, in one pass, with later columns
    // where that pass takes few vectors.
    void run(const HeadOp& s) {
        std::vector<long> missing;
        for (long r = 0; r < call.rows; r++)
            if (!shared.known[shared.key(s.column, shared.versions[r], r)] || (next == end && shared.logits_of[r] != shared.versions[r]))
                missing.push_back(r);
        const long n = (long)missing.size();
        if (n) {
            std::vector<Reading> readings;
            for (long i = 0; i < (n * s.count <= s.most ? s.count : 1); i++) collect(s, i, missing, 0, *this, readings);
            read(s, readings);
        }
        each(1, [&](long r, long) {
            const float* stats = shared.stats.data() + shared.key(s.column, shared.versions[r], r) * facts::STATS;
            const float margin = std::exp(stats[2] - stats[1]) - std::exp(stats[3] - stats[1]);
            *at(s.out, r) = s.shift + (s.stat == ENTROPY ? stats[0] : margin) / s.divisor;
            if (s.column == s.last) call.entropy[r] = stats[0];
        });
    }

    // Column `index` of s, of the residuals of `rows`, as vectors to be read. They are rows of `from`, or (run ahead) its rows
    // 0, 1, ...; firings: of these rows since their version.
    void collect(const HeadOp& s, long index, const std::vector<long>& rows, long firings, const Thread& from,
                 std::vector<Reading>& readings) {
        const long first = (long)readings.size(), width = s.h.width;
        for (long r : rows) readings.push_back({(long)s.columns[index], shared.versions[r] + firings, r});
        me.each((long)rows.size(), [&](long i) {
            const float* h = from.at(s.h, &from == this ? rows[i] : i);
            float* to = shared.vectors.data() + (first + i) * width;
            if (s.eps[index] < 0) std::memcpy(to, h, width * sizeof(float));
            else norm_row(h, s.norms + index * width, width, s.eps[index], to);
        });
    }

    // One pass over the head for the vectors that were collected.
    void read(const HeadOp& s, const std::vector<Reading>& readings) {
        const long all = (long)readings.size(), width = s.h.width, outputs = s.layers->outputs;
        me.wait();
        const long slabs = (outputs + facts::SLAB - 1) / facts::SLAB;
        ready.take(*s.layers, shared.vectors.data(), width, all);
        ready.against(*s.layers, [&](const auto& kind) {
            float* z = own(all * facts::SLAB);
            me.each(slabs, [&](long slab) {
                const long from = slab * facts::SLAB, words = from + facts::SLAB < outputs ? facts::SLAB : outputs - from;
                facts::slab_facts(kind, from, words, all, z, shared.slabs.data() + slab, slabs);
                for (long i = 0; i < all; i++)
                    if (readings[i].column == s.last)
                        std::memcpy(call.logits + readings[i].row * outputs + from, z + i * facts::SLAB, words * sizeof(float));
            });
        });
        me.wait();
        me.each(all, [&](long i) {
            const long at = shared.key(readings[i].column, readings[i].version, readings[i].row);
            facts::stats_of(facts::merged(shared.slabs.data() + i * slabs, slabs), shared.stats.data() + at * facts::STATS, 1);
            shared.known[at] = 1;
        });
        if (mine == 0) {
            call.counts[0]++, call.counts[1] += all;
            for (const Reading& reading : readings)  // of several for a row the last one's logits stay
                if (reading.column == s.last) shared.logits_of[reading.row] = reading.version;
        }
        me.wait();
    }

    // Decides; then gathers the rows that fire, runs the body for them, and puts their residuals back. The residual of a row
    // that was run ahead is there already.
    void run(const FireOp& s) {
        const long now = block++, width = s.h.width, bytes = width * sizeof(float);
        each(1, [&](long r, long) {
            const float given = *at(s.given, r);
            *at(s.fire, r) = std::isnan(given) ? *at(s.score, r) > *at(s.threshold, r) : given;
            call.fired[r * call.blocks + now] = *at(s.fire, r) != 0.f;
        });
        me.wait();
        std::vector<long> fired;  // and not run ahead
        for (long r = 0; r < call.rows; r++) {
            const bool fires = *at(s.fire, r) != 0.f;
            if (fires && !shared.ahead[r]) fired.push_back(r);
            if (!fires && mine == 0) drop_ahead(r);
        }
        if (!fired.empty()) fire(s, fired);
        me.each(call.rows, [&](long r) {
            if (*at(s.fire, r) == 0.f) return;
            if (shared.ahead[r]) std::memcpy(at(s.h, r), shared.ahead_after.data() + (now * call.rows + r) * width, bytes);
            shared.versions[r]++;
        });
        if (!fired.empty() && call.speculate && !call.chains) run_ahead(s, fired);
    }

    // The residuals of some rows after a block at which they fire.
    void fire(const FireOp& s, const std::vector<long>& fired) {
        const long n = (long)fired.size(), bytes = s.h.width * sizeof(float);
        me.each(n, [&](long i) {
            std::memcpy(shared.h.data() + i * s.h.width, at(s.h, fired[i]), bytes);
            std::memcpy(shared.x.data() + i * s.h.width, at(s.x, fired[i]), bytes);
            shared.row[i] = call.row[fired[i]], shared.position[i] = call.position[fired[i]];
        });
        me.wait();
        body(s, n, shared.h.data(), shared.x.data());
        me.each(n, [&](long i) { std::memcpy(at(s.h, fired[i]), shared.after.data() + i * s.h.width, bytes); });
        me.wait();
    }

    // n rows of h and x to shared.after.
    void body(const FireOp& s, long n, float* h, float* x) {
        float* const inputs[] = {h, x, shared.after.data()};
        Call some{};
        some.rows = n, some.scratch = shared.scratch.data(), some.inputs = inputs, some.state = call.state;
        some.row = shared.row.data(), some.position = shared.position.data();
        Thread thread{some, me, shared};
        for (long i = 0; i < s.length; i++) {
            dispatch(s.body[i], [&](const auto& step) { thread.run(step); });
            me.wait();
        }
    }

    // Runs the rest of the program for rows that fired, as if they fired at every later block, and reads the head for all columns
    // on the way in one pass. What is kept of it are readings and residuals, by version and block; keys of later blocks are
    // written again, with the same numbers or the right ones, before a query reads them.
    void run_ahead(const FireOp& s, const std::vector<long>& fired) {
        const long n = (long)fired.size(), width = s.h.width;
        long heads = 0, most = 0;
        const HeadOp* last = nullptr;
        for (const Instruction* i = next; i < end; i++)
            if (i->kind == HeadOp::kind) last = (const HeadOp*)i->fields, most = heads++ ? most : last->most;
        if (heads < 2 || n * heads > most) return;
        std::vector<float*> inputs;
        for (auto& input : shared.ahead_inputs) inputs.push_back(input.data());
        me.wait();
        me.each(n, [&](long i) { std::memcpy(inputs[s.h.buffer] + i * width, at(s.h, fired[i]), width * sizeof(float)); });
        me.wait();
        Call some{};
        some.rows = n, some.scratch = shared.ahead_scratch.data(), some.inputs = inputs.data(), some.state = call.state;
        some.row = shared.row.data(), some.position = shared.position.data();
        Thread thread{some, me, shared};
        std::vector<Reading> readings;
        long firings = 0;
        for (const Instruction* i = next; i < end; i++) {
            if (i->kind == HeadOp::kind) collect(*(const HeadOp*)i->fields, 0, fired, firings, thread, readings);
            else if (i->kind != FireOp::kind) dispatch(*i, [&](const auto& step) { thread.run(step); });
            else {
                const FireOp& later = *(const FireOp*)i->fields;
                body(later, n, thread.at(later.h, 0), thread.at(later.x, 0));
                me.each(n, [&](long j) {
                    const float* after = shared.after.data() + j * width;
                    std::memcpy(thread.at(later.h, j), after, width * sizeof(float));
                    std::memcpy(shared.ahead_after.data() + ((block + firings) * call.rows + fired[j]) * width, after, width * sizeof(float));
                });
                firings++;
            }
            me.wait();
        }
        read(*last, readings);
        if (mine == 0)
            for (long r : fired) shared.ahead[r] = 1;
    }

    // A row that does not fire: what was read of residuals after further firings is of another residual.
    void drop_ahead(long r) {
        for (long column = 0; shared.ahead[r] && column < shared.columns; column++)
            for (long version = shared.versions[r] + 1; version < shared.columns; version++)
                shared.known[shared.key(column, version, r)] = 0;
        shared.ahead[r] = 0;
    }

    void run(const AttendOp& s) {
        using namespace attention;
        const StateTensor& kv = call.state[s.kv];
        const long half = s.size / 2, width = part_size(s.size);
        const float scale = 1.f / std::sqrt((float)s.size);
        each(s.heads, [&](long r, long h) {
            const long i = call.row[r], keys = call.position[r] + 1, begin = h * kv.capacity[i] * s.size;
            float *q = own(s.size + slabs(keys) * width), *parts = q + s.size;
            turn_head(at(s.q, r) + h * s.size, kv.cos + call.position[r] * half, kv.sin + call.position[r] * half, half, 1.f, q);
            for (long j = 0; j < slabs(keys); j++) {
                const long from = j * SLAB, count = keys - from < SLAB ? keys - from : SLAB, first = begin + from * s.size;
                slab(q, kv.before[i] + first, kv.after[i] + first, count, s.size, scale, parts + j * width);
            }
            join(parts, slabs(keys), s.size, at(s.out, r) + h * s.size);
        });
    }
};

// work(instruction), with its own type
template <class Work>
void dispatch(const Instruction& step, Work work) {
    switch (step.kind) {
        case ProductOp::kind: return work(*(const ProductOp*)step.fields);
        case NormOp::kind: return work(*(const NormOp*)step.fields);
        case GatedNormOp::kind: return work(*(const GatedNormOp*)step.fields);
        case GateOp::kind: return work(*(const GateOp*)step.fields);
        case AddOp::kind: return work(*(const AddOp*)step.fields);
        case ConvOp::kind: return work(*(const ConvOp*)step.fields);
        case ScanOp::kind: return work(*(const ScanOp*)step.fields);
        case DeltaOp::kind: return work(*(const DeltaOp*)step.fields);
        case KeysOp::kind: return work(*(const KeysOp*)step.fields);
        case AttendOp::kind: return work(*(const AttendOp*)step.fields);
        case DotOp::kind: return work(*(const DotOp*)step.fields);
        case SiluDotOp::kind: return work(*(const SiluDotOp*)step.fields);
        case HeadOp::kind: return work(*(const HeadOp*)step.fields);
        case FireOp::kind: return work(*(const FireOp*)step.fields);
    }
}

// Whether every row's position has a slot among the keys it writes or reads.
bool fits(const Instruction& step, const Call& call) {
    bool inside = true;
    dispatch(step, [&](const auto& s) {
        using Kind = std::decay_t<decltype(s)>;
        if constexpr (std::is_same_v<Kind, KeysOp> || std::is_same_v<Kind, AttendOp>)
            for (long r = 0; r < call.rows; r++)
                inside &= call.position[r] >= 0 && call.position[r] < call.state[s.kv].capacity[call.row[r]];
    });
    return inside;
}

}  // namespace

// Returns 0; or 1, having done nothing, where a position lies outside the slots of the keys.
extern "C" int walk(const Instruction* steps, long count, const Call* call, int threads) {
    for (long i = 0; i < count; i++)
        if (!fits(steps[i], *call)) return 1;
    Shared shared;
    long width = 0, blocks = 0;
    for (long i = 0; i < count; i++)
        dispatch(steps[i], [&](const auto& s) {
            using Kind = std::decay_t<decltype(s)>;
            if constexpr (std::is_same_v<Kind, HeadOp> || std::is_same_v<Kind, FireOp>) shared.fit(s, call->rows);
            if constexpr (std::is_same_v<Kind, FireOp>) width = s.h.width, blocks++;
        });
    if (call->speculate) shared.fit(*call, blocks, width);
    expect_more();
    together(threads, [&](Member me) {
        Thread thread{*call, me, shared};
        for (long i = 0; i < count; i++) {
            thread.next = steps + i + 1, thread.end = steps + count;
            dispatch(steps[i], [&](const auto& s) { thread.run(s); });
            if (i + 1 < count) me.wait();
        }
    });
    return 0;
}

LAYOUT(STRUCT(Vector, buffer, scratch_offset, row_stride, offset, width)
       STRUCT(StateTensor, before, after, cos, sin, capacity)
       STRUCT(Call, rows, scratch, inputs, state, row, position, chains, chain_count, logits, entropy, counts, fired, blocks, widths, input_count, scratch_size,
              speculate)
       STRUCT(Instruction, kind, fields)
       STRUCT(Weights, weight, scales, outputs, inner, format)
       STRUCT(ProductOp, x, out, add, layers, count)
       STRUCT(NormOp, x, out, weight, size, eps)
       STRUCT(GatedNormOp, x, z, out, weight, size, gate_first, eps)
       STRUCT(GateOp, x, z, out, act)
       STRUCT(AddOp, x, y, out, scale)
       STRUCT(ConvOp, x, out, taps, bias, window, reach)
       STRUCT(ScanOp, u, dt, B, C, out, A, D, dt_bias, state, heads, size, groups, states)
       STRUCT(DeltaOp, q, k, v, a, b, out, A, dt_bias, state, heads, size, value, rates)
       STRUCT(KeysOp, k, v, kv, heads, size)
       STRUCT(AttendOp, q, out, kv, heads, size)
       STRUCT(DotOp, x, out, weight, bias)
       STRUCT(SiluDotOp, x, out, bias, weight)
       STRUCT(HeadOp, h, out, column, last, stat, count, shift, divisor, most, columns, norms, eps, layers, layers_count)
       STRUCT(FireOp, h, x, score, threshold, given, fire, scratch, body, length)
       NUMBER(ProductOp.kind, ProductOp::kind)
       NUMBER(NormOp.kind, NormOp::kind)
       NUMBER(GatedNormOp.kind, GatedNormOp::kind)
       NUMBER(GateOp.kind, GateOp::kind)
       NUMBER(AddOp.kind, AddOp::kind)
       NUMBER(ConvOp.kind, ConvOp::kind)
       NUMBER(ScanOp.kind, ScanOp::kind)
       NUMBER(DeltaOp.kind, DeltaOp::kind)
       NUMBER(KeysOp.kind, KeysOp::kind)
       NUMBER(AttendOp.kind, AttendOp::kind)
       NUMBER(DotOp.kind, DotOp::kind)
       NUMBER(SiluDotOp.kind, SiluDotOp::kind)
       NUMBER(HeadOp.kind, HeadOp::kind)
       NUMBER(FireOp.kind, FireOp::kind))
