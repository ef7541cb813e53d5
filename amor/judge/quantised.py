"""What 8-bit weights cost in perplexity: measured on given text, step by step, with the very step that decode runs."""

import math

import torch
from torch import Tensor

from amor.decode.step import Packed
from amor.errors import AmorError
from amor.models.amor import Amor


@torch.no_grad()
def perplexity(packed: Packed, model: Amor, tokens: Tensor) -> float:
    """Of tokens [R, T], every row read from its beginning."""
    if tokens.shape[1] < 2:
        raise AmorError(f"perplexity needs at least 2 tokens a row to predict one, not {tokens.shape[1]}")
    state, total = model.start(len(tokens)), 0.0
    for t in range(tokens.shape[1] - 1):
        seen = packed.step(tokens[:, t], state)
        state = seen.state
        total -= float(seen.logits.log_softmax(-1).gather(1, tokens[:, t + 1 : t + 2]).double().sum())
    return math.exp(total / tokens[:, 1:].numel())


def quantised_perplexity(model: Amor, tokens: Tensor) -> dict[str, float]:
    """The perplexity of tokens [R, T] with float32 and with 8-bit weights, by name."""
    return {kind: perplexity(Packed(model, kind), model, tokens) for kind in ("float32", "int8")}
