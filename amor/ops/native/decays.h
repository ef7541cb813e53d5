// Decays inside a chunk, and the gradient of their logarithms; shared by the recurrences.
#pragma once
#include <cmath>
#include <cstdint>

#include "lanes.h"

constexpr int MAX_CHUNK = 256;

// The running sums of one head's log decays in one chunk. They are kept as two floats (value and remainder), because a
// difference of large sums must stay exact: after a decay of e^-10000 the next ones still differ.
struct Decays {
    int tokens;
    float high[MAX_CHUNK + LANES], low[MAX_CHUNK + LANES];
    float since[MAX_CHUNK + LANES];  // from the chunk's start to a token, that token's own decay included
    float until[MAX_CHUNK + LANES];  // from behind a token to the chunk's end
    float carry;
    int document[MAX_CHUNK];  // documents begun in this chunk so far
    int start[MAX_CHUNK];     // the first token of a token's document in this chunk
    bool whole;               // no document begins in this chunk

    // logs[t * step]: log decay <= 0; reset may be null
    void sum_up(const float* logs, long step, float factor, const uint8_t* reset, int count) {
        tokens = count;
        double total = 0;
        int begun = 0, began = 0;
        for (int t = 0; t < count; t++) {
            total += (double)(logs[t * step] * factor);
            if (reset && reset[t]) begun++, began = t;
            high[t] = (float)total;
            low[t] = (float)(total - (double)high[t]);
            document[t] = begun;
            start[t] = began;
        }
        whole = begun == 0;
        for (int t = count; t < count + LANES; t++) high[t] = high[count - 1], low[t] = low[count - 1];
        for (int t = 0; t < count; t += LANES) {
            store(since + t, exp(load(high + t)));
            store(until + t, exp((high[count - 1] - load(high + t)) + (low[count - 1] - load(low + t))));
        }
        carry = since[count - 1];
        if (whole) return;
        carry = 0;
        for (int t = 0; t < count; t++) {
            if (document[t]) since[t] = 0;
            if (document[t] != begun) until[t] = 0;
        }
    }

    // e[t, s] for the vector of s that begins at s0 (s0 <= t): from behind s to t, 0 above the diagonal or across documents
    vec between(int t, int s0) const {
        vec e = exp((high[t] - load(high + s0)) + (low[t] - load(low + s0)));
        if (s0 + LANES > t + 1) e = choose(count_up() <= (ivec)(ivec{} + (t - s0)), e, vec{});
        if (!whole && s0 < start[t]) e = choose(count_up() >= (ivec)(ivec{} + (start[t] - s0)), e, vec{});
        return e;
    }
};

// The gradient of log decays. pairs[t] is the sum over s < t of what pair (t, s) sends to log e[t, s], minus the sum over
// later tokens of what they send through t. Every number enters once with each sign, so sums in double cancel.
struct LogGrads {
    double pairs[MAX_CHUNK + LANES];
    float into[MAX_CHUNK];   // what a token sends to log since
    float outof[MAX_CHUNK];  // what a token sends to log until

    void clear(int tokens) {
        for (int t = 0; t < tokens + LANES; t++) pairs[t] = 0;
    }
    // m: what pairs (t, s0...) send; those with s >= t are left out
    void add(int t, int s0, vec m) {
        if (s0 + LANES > t) m = choose(count_up() < (ivec)(ivec{} + (t - s0)), m, vec{});
        dvec d = __builtin_convertvector(m, dvec), p;
        std::memcpy(&p, pairs + s0, sizeof p);
        p -= d;
        std::memcpy(pairs + s0, &p, sizeof p);
        double row = 0;
        for (int j = 0; j < LANES; j++) row += d[j];
        pairs[t] += row;
    }
    // grads[t]: the gradient of each token's log decay; across: what the state before the chunk sends through all of it
    void finish(float* grads, int tokens, double across) {
        double before = 0;
        for (int t = 0; t < tokens; t++) grads[t] = (float)(before + across), before += outof[t];
        double after = 0;
        for (int t = tokens - 1; t >= 0; t--) {
            after += pairs[t] + into[t];
            grads[t] += (float)after;
        }
    }
};
