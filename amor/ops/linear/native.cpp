// A linear layer's products (large.h), called with the strides of both sides.
#include "large.h"
#include "layout.h"

struct Sides {
    Matrix a, b;
    long m, n, inner, row;  // row: between rows of out
};

extern "C" void linear(const Sides* s, float* out, int add, int threads) {
    multiply(out, s->row, s->m, s->n, s->inner, s->a, s->b, add, threads);
}

LAYOUT(STRUCT(Matrix, p, row, col) STRUCT(Sides, a, b, m, n, inner, row))
