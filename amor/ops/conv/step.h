// One token of the short causal convolution and its SiLU, for a block of channels of one row.
#pragma once
#include "lanes.h"

// x, bias (or null) and y [C]; taps [reach + 1, C], the last meets x; window [reach, C]: the inputs before x. Channels [from, to)
// of all of them are read, and of y and `after` written: the window moved on by one token; `after` may be `window` itself.
static inline void conv_token(const float* x, const float* taps, const float* bias, const float* window, float* after, long channels,
                              long reach, long from, long to, float* y) {
    over(to - from, [&](long i, int n) {
        const long c = from + i;
        const vec newest = get(x + c, n);
        vec s = bias ? get(bias + c, n) : vec{};
        for (long j = 0; j < reach; j++) {
            const vec held = get(window + j * channels + c, n);
            s += held * get(taps + j * channels + c, n);
            if (j) put(after + (j - 1) * channels + c, held, n);
        }
        s += newest * get(taps + reach * channels + c, n);
        if (reach) put(after + (reach - 1) * channels + c, newest, n);
        put(y + c, s * sigmoid(s), n);
    });
}
