"""Run by test_ops_head.py with TRITON_INTERPRET=1: the kernel, interpreted,
reads what the reference reads."""

import torch
from laws import close

from amor.ops.head import IGNORE, reference, triton

for tokens, vocab, width, spread in (
    (1, 2, 8, 1.0),
    (5, 300, 48, 1.0),
    (70, 4500, 33, 0.3),
    (3, 700, 64, 20.0),
):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, width) * spread, torch.randn(vocab, width)
    targets = torch.randint(0, vocab, (tokens,))
    targets[1:2] = IGNORE
    want, got = (backend.read(x, weight, targets, entropy=True) for backend in (reference, triton))
    for name in ("nll", "entropy", "logsumexp"):
        close(getattr(got, name), getattr(want, name), f"{tokens} x {vocab} x {width}: {name}")
    assert triton.read(x, weight, entropy=True).nll is None
