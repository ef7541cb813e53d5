"""The Triton kernel of the head's entropy: logits live in registers, a tile at a time.

Importing this file needs triton; amor/ops/head/triton.py calls it. Letters: N tokens, V words, D
width.
"""

import triton
import triton.language as tl


@triton.jit
def read_tile(  # type: ignore[no-untyped-def]
    x_ptr,  # [N, D]
    weight_ptr,  # [V, D]
    target_ptr,  # [N]
    out_ptr,  # [splits, 4, N] maximum, sum of exp, sum of (z - m) exp, logit of the target
    N,
    V,
    D: tl.constexpr,
    span,  # words of one split
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of tokens against one split of the vocabulary; sums are relative to the maximum."""
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(1)
    real = rows < N
    target = tl.load(target_ptr + rows, mask=real, other=-1)
    m = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    weighted = tl.zeros([TOKENS], tl.float32)
    hit = tl.zeros([TOKENS], tl.float32)
    end = tl.minimum((split + 1) * span, V)
    for start in range(split * span, end, WORDS):
        words = start + tl.arange(0, WORDS)
        z = tl.zeros([TOKENS, WORDS], tl.float32)
        for at in range(0, D, WIDTH):
            column = at + tl.arange(0, WIDTH)
            x_at = x_ptr + rows[:, None].to(tl.int64) * D + column[None, :]
            w_at = weight_ptr + words[None, :].to(tl.int64) * D + column[:, None]
            x = tl.load(x_at, mask=real[:, None] & (column < D)[None, :], other=0.0)
            w = tl.load(w_at, mask=(words < end)[None, :] & (column < D)[:, None], other=0.0)
            z = tl.dot(x, w.to(x.dtype), acc=z, input_precision="ieee")
        hit += tl.sum(tl.where(words[None, :] == target[:, None], z, 0.0), axis=1)
        z = tl.where((words < end)[None, :], z, float("-inf"))
        new = tl.maximum(m, tl.max(z, axis=1))
        # before the first words m is -inf and nothing is to be moved: (-inf - new) * 0 is NaN
        moved = tl.where(total > 0, m - new, 0.0)
        shrink = tl.where(total > 0, tl.exp(moved), 0.0)
        shifted = tl.where((words < end)[None, :], z - new[:, None], 0.0)
        e = tl.where((words < end)[None, :], tl.exp(shifted), 0.0)
        weighted = shrink * (weighted + moved * total) + tl.sum(e * shifted, axis=1)
        total = shrink * total + tl.sum(e, axis=1)
        m = new
    base = out_ptr + split * 4 * N + rows
    tl.store(base, m, mask=real)
    tl.store(base + N, total, mask=real)
    tl.store(base + 2 * N, weighted, mask=real)
    tl.store(base + 3 * N, hit, mask=real)
