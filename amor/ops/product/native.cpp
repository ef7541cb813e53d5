// Products and probes of the head for decode, on the skinny products of skinny.h.
#include <algorithm>

#include "facts.h"
#include "layout.h"
#include "skinny.h"
#include "team.h"

namespace {

using namespace facts;

// One pass over W: facts [rows] of the logits, and into y the logits themselves of rows from `first` on.
template <class Kind>
void probe_rows(const Kind& kind, long outputs, long rows, float* y, long first, Facts* facts, int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
    std::vector<Facts> room(rows * slabs);
    together(threads, [&](Member me) {
        std::vector<float> z(rows * SLAB);
        me.each(slabs, [&](long slab) {
            const long from = slab * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
            slab_facts(kind, from, count, rows, z.data(), room.data() + slab, slabs);
            for (long r = first; r < rows; r++)
                std::memcpy(y + (r - first) * outputs + from, z.data() + r * SLAB, count * sizeof(float));
        });
    });
    for (long r = 0; r < rows; r++) facts[r] = merged(room.data() + r * slabs, slabs);
}

}  // namespace

// x rounded as a format rounds it: whole [rows, padded] (int16 or int8), units [rows or rows * groups]. Gives how many units.
extern "C" long rounded(const Weights* m, const float* x, long rows, void* whole, float* units) {
    Ready ready;
    ready.take(*m, x, m->inner, rows);
    const long group = m->format == INT8 ? Bytes::GROUP : Nibbles::GROUP, bytes = m->format == INT8 ? 2 : 1;
    std::memcpy(whole, ready.whole, rows * ready.groups * group * bytes);
    std::memcpy(units, ready.units.data(), ready.units.size() * sizeof(float));
    return (long)ready.units.size();
}

// y [rows, outputs], its rows `step` apart; add: y += ...
extern "C" void product(const Weights* m, const float* x, long rows, float* y, long step, int add, int threads) {
    Ready ready;
    ready.take(*m, x, m->inner, rows);
    ready.against(*m, [&](const auto& kind) {
        together(threads, [&](Member me) {
            const Share share(m->outputs, me.mine, me.of);
            part(kind, share.from, share.to, rows, y, step, add);
        });
    });
}

// One pass over the head for x [rows, inner]: stats [STATS, rows] are entropy, logsumexp and the two best logits, tokens [rows]
// the best tokens, and y the logits of rows from `skipped` on.
extern "C" void probe(const Weights* head, const float* x, long rows, float* y, long skipped, float* stats, int64_t* tokens,
                      int threads) {
    Ready ready;
    ready.take(*head, x, head->inner, rows);
    std::vector<Facts> each(rows);
    ready.against(*head, [&](const auto& kind) {
        probe_rows(kind, head->outputs, rows, y, skipped, each.data(), threads);
    });
    for (long r = 0; r < rows; r++) {
        stats_of(each[r], stats + r, rows);
        tokens[r] = (int64_t)each[r].place;
    }
}

// The entropy, in nats, of rows of logits [rows, outputs].
extern "C" void entropies(const float* z, long rows, long outputs, float* entropy, int threads) {
    const long slabs = (outputs + SLAB - 1) / SLAB;
    std::vector<Facts> room(rows * slabs);
    const auto each = [&](long i) {
        const long from = i % slabs * SLAB, count = from + SLAB < outputs ? SLAB : outputs - from;
        room[i] = digest(z + i / slabs * outputs + from, count, from);
    };
    together(threads, [&](Member me) { me.each(rows * slabs, each); });
    for (long r = 0; r < rows; r++) {
        const Facts f = merged(room.data() + r * slabs, slabs);
        entropy[r] = (float)(std::log(f.total) - f.first / f.total);
    }
}

// The sum of a large array, for measuring how fast memory is read.
extern "C" float stream(const float* data, long count, int threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (long block = 0; block < count / 4096; block++) {
        vec a{}, b{}, c{}, d{};
        const float* p = data + block * 4096;
        for (int j = 0; j < 4096; j += 4 * LANES) {
            __builtin_prefetch(p + j + 1024);
            __builtin_prefetch(p + j + 1024 + 2 * LANES);
            a += load(p + j), b += load(p + j + LANES), c += load(p + j + 2 * LANES), d += load(p + j + 3 * LANES);
        }
        total += sum(a + b + c + d);
    }
    return total;
}

LAYOUT(STRUCT(Weights, weight, scales, outputs, inner, format)
       NUMBER(TILE, TILE)
       NUMBER(STATS, STATS)
       NUMBER(float32, FLOAT32)
       NUMBER(float16, FLOAT16)
       NUMBER(int8, INT8)
       NUMBER(int4, INT4)
       NUMBER(int8_group, Bytes::GROUP)
       NUMBER(int4_group, Nibbles::GROUP))
