// Lone queries, each against the first keys of its row, at the speed of reading keys and values once.
#include <cstdint>
#include <vector>

#include "attend/step.h"

// q, out [queries, heads, size]; keys of row b, head h begin at k + b * row + h * head; query i sees the first lengths[i]
// of `keys`. Gives 0, or 1 and does nothing where a row or a key is asked for that is not there.
extern "C" int attend(const float* q, const float* k, const float* v, const int64_t* rows, const int64_t* lengths, long queries,
                      long batch, long keys, long heads, long size, long row, long head, float scale, float* out, int threads) {
    using namespace attention;
    long most = 1;
    for (long i = 0; i < queries; i++)
        if (rows[i] < 0 || rows[i] >= batch || lengths[i] < 0 || lengths[i] > keys) return 1;
    for (long i = 0; i < queries; i++) most = lengths[i] > most ? lengths[i] : most;
    const long each = slabs(most), width = part_size(size);
    std::vector<float> parts(queries * heads * each * width);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long task = 0; task < queries * heads * each; task++) {
        const long i = task / (heads * each), h = task / each % heads, from = task % each * SLAB;
        const long count = lengths[i] - from < SLAB ? lengths[i] - from : SLAB;
        if (count <= 0) continue;
        const long begin = rows[i] * row + h * head + from * size;
        slab(q + (i * heads + h) * size, k + begin, v + begin, count, size, scale, parts.data() + task * width);
    }
    for (long i = 0; i < queries * heads; i++) join(parts.data() + i * each * width, slabs(lengths[i / heads]), size, out + i * size);
    return 0;
}
