"""Validation: nll per token, firing rates of the gates, accuracy on questions of tasks."""

from collections.abc import Callable

import torch
from torch import Tensor

from amor.judge.loop import WindowSource, run_windows
from amor.judge.recall import right_answers
from amor.models.amor import Amor, Output
from amor.numbers import finite, perplexity
from amor.ops.head import IGNORE
from amor.records.run import Answered, Valid


def evaluate(
    model: Amor,
    text: WindowSource,
    rows: int,  # windows per forward call
    # called instead of the model, e.g. under autocast
    forward: Callable[..., Output] | None = None,
    # sums over all ranks, each of which reads its own windows
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Valid:
    """Mean nll, perplexity and firing rates, and the accuracy where the text has questions."""
    blocks, device = len(model.blocks), model.embed.weight.device
    # nll, targets, tokens, right answers, answers; per block fired tokens, and fired tokens of
    # answers
    sums = torch.zeros(5 + 2 * blocks, dtype=torch.float64, device=device)
    for output in run_windows(model, text, rows=rows, forward=forward):
        targets = output.chunk.targets
        assert targets is not None
        sums[0] += output.nll.double().sum()
        sums[1] += (targets != IGNORE).sum()
        sums[2] += targets.numel()
        sums[5 : 5 + blocks] += output.fire.sum((1, 2))
        if output.chunk.question is not None:
            answer = output.chunk.question > 0
            sums[3] += right_answers(model, output).sum()
            sums[4] += answer.sum()
            sums[5 + blocks :] += (output.fire & answer).sum((1, 2))
    nll, scored, fed, hits, answers, *fired = total(sums).tolist()
    mean = finite(nll / max(scored, 1))
    answered = None
    if answers:
        rates = tuple(f / answers for f in fired[blocks:])
        answered = Answered(accuracy=hits / answers, tokens=int(answers), fire=rates)
    return Valid(
        nll=mean,
        perplexity=None if mean is None else perplexity(mean),
        tokens=int(scored),
        fire=tuple(f / fed for f in fired[:blocks]),
        answered=answered,
    )
