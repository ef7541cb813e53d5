"""How well a model predicts windows of text: nll a token, how often its gates fire as they stand, what questions it answers."""

from collections.abc import Callable

import torch
from torch import Tensor

from amor.judge.loop import Text, read
from amor.judge.recall import questions, right
from amor.models.amor import Amor, Output
from amor.numbers import finite, perplexity
from amor.ops.head import IGNORE
from amor.records.run import Answered, Valid


def evaluate(
    model: Amor,
    text: Text,
    rows: int,
    forward: Callable[..., Output] | None = None,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,  # over all ranks, each of which reads windows of its own
) -> Valid:
    """Mean nll over windows, the same ones every time."""
    blocks, device = len(model.blocks), model.embed.weight.device
    # nll, targets, tokens, right answers, answers; tokens fired a block, and those of answers
    sums = torch.zeros(5 + 2 * blocks, dtype=torch.float64, device=device)
    for said in read(model, text, rows=rows, forward=forward):
        targets = said.text.targets
        sums[0] += said.nll.double().sum()
        sums[1] += (targets != IGNORE).sum()
        sums[2] += targets.numel()
        sums[5 : 5 + blocks] += said.fire.sum((1, 2))
        if said.text.asked is not None:
            asked = questions(said.text)
            sums[3] += right(model, said).sum()
            sums[4] += asked.sum()
            sums[5 + blocks :] += (said.fire & asked).sum((1, 2))
    nll, scored, read_, hits, answers, *fired = total(sums).tolist()
    mean = finite(nll / max(scored, 1))
    return Valid(
        nll=mean,
        perplexity=None if mean is None else perplexity(mean),
        tokens=int(scored),
        fire=tuple(f / read_ for f in fired[:blocks]),
        answered=Answered(accuracy=hits / answers, tokens=int(answers), fire=tuple(f / answers for f in fired[blocks:]))
        if answers
        else None,
    )
