"""What rounded weights cost in perplexity: measured on given text, step by step, with the very steps that decode takes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amor.data.loader import cut
from amor.decode.engine import Engine
from amor.errors import AmorError
from amor.judge.loop import gathered, read
from amor.models.amor import Amor, Output
from amor.models.block import Trace
from amor.numbers import perplexity
from amor.ops.head import IGNORE
from amor.state import State


class Stepwise:
    """An engine in the place of a model's forward: every token a step of its own. Hidden vectors stay inside it."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __call__(self, tokens: Tensor, state: State | None, *, targets: Tensor, **more: Any) -> Output:
        if any(value is not None for name, value in more.items() if name != "compute"):
            raise AmorError("an engine reads joined documents with its own gates; it takes neither reset nor gates nor residual")
        session = self.engine.resume(self.engine.model.start(len(tokens)) if state is None else state)
        nll, fire, score = [], [], []
        for t in range(tokens.shape[1]):
            found, wanted = session.step(tokens[:, t]), targets[:, t : t + 1]
            nll.append(-found.logits.log_softmax(-1).gather(1, wanted.clamp(min=0)).masked_fill(wanted == IGNORE, 0.0))
            fire.append(found.fire)
            score.append(found.score)
        blocks = [block.gate.threshold for block in self.engine.model.each_block()]
        scores, fires = torch.stack(score, 1), torch.stack(fire, 1)  # [B, T, K]
        gates = tuple(Trace(scores[..., k], fires[..., k], threshold) for k, threshold in enumerate(blocks))
        nothing = nll[0].new_zeros(*tokens.shape, 0)
        return Output(nothing, session.state, nothing, gates, nll=torch.cat(nll, 1))


def quantised_perplexity(model: Amor, tokens: Tensor, formats: Iterable[str]) -> dict[str, float]:
    """The perplexity of tokens [R, T] with weights of some formats, by name; every row is read from its beginning."""
    if tokens.shape[1] < 2:
        raise AmorError(f"perplexity needs at least 2 tokens a row to predict one, not {tokens.shape[1]}")
    found = {}
    for kind in formats:
        steps = Stepwise(Engine(model, weights=kind))
        nll = gathered(read(model, cut(tokens), rows=len(tokens), forward=steps)).nll
        found[kind] = perplexity(float(nll.double().mean()))
    return found
