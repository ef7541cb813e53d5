"""From which context on a gated model decodes faster than another: by formula and by measurement.

Letters: V vocabulary, D width, L context, f firing rate, K gated blocks, n attention layers of the
other model, w their width over D, p and q passes over the head per token of the gated and of the
other model.
"""

from collections.abc import Sequence
from itertools import pairwise

from amor.models.amor import Amor
from amor.presets import ARCHITECTURES, SCALES


def paper_break_even(vocab: int, rate: float) -> float | None:
    """The paper's formula: attention skipped on 1 - f of the tokens pays for one reading of the
    head, (1 - f) 4 L D = 2 V D."""
    return vocab / (2 * (1 - rate)) if rate < 1 else None


def attention_layers(name: str, scale: str) -> float:
    """n w: the attention a model runs at every token, in layers as wide as the model."""
    depth = SCALES[scale]["depth"]
    everywhere, special, where, _ = ARCHITECTURES[name]
    if everywhere == "attention":
        return depth
    count = len(where.get(depth, ()))
    return count / 4 if special == "fused" else float(count)


def break_even(
    vocab: int, rate: float, blocks: int, passes: float, attention: float, others: float = 1.0
) -> float | None:
    """Our formula: (n w - f K) 4 L D = (p - q) 2 V D; None where the other model never runs more
    attention.

    passes and others: p and q; attention: n w.
    """
    saved = attention - rate * blocks
    return (passes - others) * vocab / (2 * saved) if saved > 0 else None


def bytes_break_even(
    gated: Amor, other: Amor, rate: float, passes: float, others: float = 1.0, most: int = 2**23
) -> float | None:
    """The context at which both models read equally many bytes per token; None where there is none
    up to `most`. Bytes grow linearly with the context, so two points give the crossing."""

    def bytes_read(model: Amor, context: int, rate: float, passes: float) -> float:
        cost = model.cost(context, rate, passes)
        return 4 * cost.weights + cost.state_read

    at_zero, at_most = (
        bytes_read(gated, context, rate, passes) - bytes_read(other, context, 1.0, others)
        for context in (0, most)
    )
    if at_zero <= 0:
        return 0.0
    return None if at_most >= 0 else most * at_zero / (at_zero - at_most)


def measured_break_even(contexts: Sequence[int], gaps: Sequence[float]) -> float | None:
    """The context at which the measured seconds per token are equal, by linear interpolation; None
    where the gated model is slower at every context.

    gaps: seconds per token by which the gated model is slower, per context. 0 is returned where it
    is faster already at the first context.
    """
    if gaps and gaps[0] <= 0:
        return 0.0
    for (c0, g0), (c1, g1) in pairwise(zip(contexts, gaps, strict=True)):
        if g1 <= 0:
            return c0 + (c1 - c0) * g0 / (g0 - g1)
    return None
