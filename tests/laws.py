"""What every law shares: the one tolerance, and small models of every kind."""

import json
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import amor
from amor import typed
from amor.judge.randomise import randomise_for_test
from amor.models.amor import Amor

# how far two ways of computing the same number may lie apart, relative
# to the largest number compared
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}

# every architecture, small enough that a law takes milliseconds; odd sizes on purpose
SMALL = {
    "width": 64,
    "d_ff": 96,
    "vocab": 211,
    "mixers": {
        "attention": {"head_size": 16},
        "mamba2": {"head_size": 16, "state_size": 24},
        "gated_deltanet": {"head_size": 16},
        "kda": {"head_size": 16},
        "fused": {"head_size": 16, "state_size": 24},
    },
    "blocks.head_size": 16,
}

# a variant changes the gate and nothing of the mixer: one backbone stands for all, and
# another for the one that learns
VARIED = (
    *(
        "amor-mamba2-final",
        "amor-mamba2-once",
        "amor-mamba2-gain",
        "amor-gated-deltanet-gain",
        "amor-mamba2-router",
    ),
    *("amor-mamba2 untied bare", "amor-gated-deltanet-final bare"),
)
# words behind a name: what models of other people are, whose heads are their own, and what is
# attached to them (docs/how-to)
WORDS = {"untied": {"tied": False}, "bare": {"blocks.final": "none"}}


def close(a: Tensor, b: Tensor, what: str = "values", dtype: torch.dtype | None = None) -> None:
    """a and b are the same numbers, computed in two ways."""
    assert a.shape == b.shape, f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
    assert torch.isfinite(a).all() and torch.isfinite(b).all(), f"{what}: not finite"
    if a.numel() == 0:
        return
    allowed = TOLERANCE[dtype or a.dtype] * max(1.0, b.detach().abs().max().item())
    worst = (a - b).abs().max().item()
    assert worst <= allowed, f"{what}: differ by {worst:.2e}, allowed {allowed:.2e}"


def small(name: str, **changes: object) -> Amor:
    """A small model of an architecture with weights large enough to matter and gates that fire."""
    name, *words = name.split()
    config = amor.preset(name, "tiny", **SMALL)
    for word in words:
        config = config.change(**WORDS[word])
    config = config.change(**changes)
    return randomise_for_test(amor.build(config), seed=1).eval()


def tokens(rows: int, columns: int, vocab: int = 211, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (rows, columns), generator=torch.Generator().manual_seed(seed))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes():
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


def plain(thing: Any) -> Any:
    """A typed thing as whoever reads its file finds it."""
    return json.loads(typed.line(thing))
