"""Perplexity with rounded weights, token by token with the decode engine's own steps."""

from collections.abc import Iterable

import torch
from torch import Tensor

from amor.decode.engine import Engine
from amor.errors import AmorError
from amor.models.amor import Amor
from amor.numbers import perplexity


def quantised_perplexity(model: Amor, tokens: Tensor, formats: Iterable[str]) -> dict[str, float]:
    """Perplexity of tokens [R, T] by weight format; every row is read from its beginning."""
    if tokens.shape[1] < 2:
        raise AmorError(
            f"perplexity needs at least 2 tokens per row to predict one, not {tokens.shape[1]}"
        )
    return {
        kind: perplexity(float(step_nll(Engine(model, weights=kind), tokens).double().mean()))
        for kind in formats
    }


@torch.no_grad()
def step_nll(engine: Engine, tokens: Tensor) -> Tensor:
    """[R, T - 1] nats of every token of [R, T] but the first, by one engine step per token."""
    session = engine.resume(engine.model.start(len(tokens)))
    columns = tokens.unbind(1)
    steps = (session.step(column).logits.log_softmax(-1) for column in columns[:-1])
    return -torch.cat([log.gather(1, t[:, None]) for log, t in zip(steps, columns[1:])], 1)
