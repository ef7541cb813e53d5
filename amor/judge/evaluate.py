"""How well a model predicts windows of text: nll a token, and how often its gates fire as they stand."""

from collections.abc import Callable

import torch
from torch import Tensor

from amor.judge.loop import Text, read
from amor.models.amor import Amor, Output
from amor.numbers import finite, perplexity
from amor.ops.head import IGNORE
from amor.records.run import Valid


def evaluate(
    model: Amor,
    text: Text,
    rows: int,
    forward: Callable[..., Output] | None = None,
    total: Callable[[Tensor], Tensor] = lambda sums: sums,  # over all ranks, each of which reads windows of its own
) -> Valid:
    """Mean nll over windows, the same ones every time."""
    device = model.embed.weight.device
    sums = torch.zeros(3 + len(model.blocks), dtype=torch.float64, device=device)  # nll, targets, tokens, tokens fired a block
    for said in read(model, text, rows=rows, forward=forward):
        targets = said.text.targets
        sums[0] += said.nll.double().sum()
        sums[1] += (targets != IGNORE).sum()
        sums[2] += targets.numel()
        sums[3:] += said.fire.sum((1, 2))
    nll, scored, read_, *fired = total(sums).tolist()
    mean = finite(nll / max(scored, 1))
    return Valid(
        nll=mean,
        perplexity=None if mean is None else perplexity(mean),
        tokens=int(scored),
        fire=tuple(f / read_ for f in fired),
    )
