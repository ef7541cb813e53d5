"""Perplexity with rounded weights, token by token with the decode engine's own steps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amor.data.loader import cut
from amor.decode.engine import Engine
from amor.errors import AmorError
from amor.judge.loop import join_chunks, run_windows
from amor.models.amor import Amor, Output
from amor.models.block import GateTrace
from amor.numbers import perplexity
from amor.ops.head import IGNORE
from amor.state import State


class EngineForward:
    """A decode engine as a model's forward: one step per token, without hidden vectors."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __call__(
        self, tokens: Tensor, state: State | None, *, targets: Tensor, **more: Any
    ) -> Output:
        if any(value is not None for name, value in more.items() if name != "compute"):
            own = "an engine reads joined documents with its own gates"
            raise AmorError(f"{own}; it takes neither reset nor gates nor residual")
        session = self.engine.resume(
            self.engine.model.start(len(tokens)) if state is None else state
        )
        nll, fire, score = [], [], []
        for t in range(tokens.shape[1]):
            step, wanted = session.step(tokens[:, t]), targets[:, t : t + 1]
            nll.append(
                -step.logits.log_softmax(-1)
                .gather(1, wanted.clamp(min=0))
                .masked_fill(wanted == IGNORE, 0.0)
            )
            fire.append(step.fire)
            score.append(step.score)
        blocks = [block.gate.threshold for block in self.engine.model.each_block()]
        scores, fires = torch.stack(score, 1), torch.stack(fire, 1)  # [B, T, K]
        gates = tuple(
            GateTrace(scores[..., k], fires[..., k], threshold)
            for k, threshold in enumerate(blocks)
        )
        nothing = nll[0].new_zeros(*tokens.shape, 0)
        return Output(nothing, session.state, nothing, gates, nll=torch.cat(nll, 1))


def quantised_perplexity(model: Amor, tokens: Tensor, formats: Iterable[str]) -> dict[str, float]:
    """Perplexity of tokens [R, T] by weight format; every row is read from its beginning."""
    if tokens.shape[1] < 2:
        raise AmorError(
            f"perplexity needs at least 2 tokens per row to predict one, not {tokens.shape[1]}"
        )
    by_format = {}
    for kind in formats:
        steps = EngineForward(Engine(model, weights=kind))
        nll = join_chunks(run_windows(model, cut(tokens), rows=len(tokens), forward=steps)).nll
        by_format[kind] = perplexity(float(nll.double().mean()))
    return by_format
