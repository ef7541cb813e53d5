"""How well the model predicts the validation split: nll a token, with the gates as they stand."""

from typing import Any

import torch

from amor.ops.head import IGNORE
from amor.train.step import Source, Stepper, finite, piece
from amor.train.watch import perplexity


@torch.no_grad()
def evaluate(stepper: Stepper, source: Source, windows: int) -> dict[str, Any]:
    """Mean nll over `windows` windows of a source, the same ones every time, shared by all ranks."""
    team, recipe = stepper.team, stepper.recipe
    first, last = team.share(windows)
    blocks = len(stepper.blocks())
    sums = torch.zeros(2 + blocks, dtype=torch.float64, device=team.device)  # nll, targets, tokens fired a block
    for start in range(first, last, recipe.micro_batch):
        tokens, targets = source.rows(0, start, min(start + recipe.micro_batch, last))
        part = piece(tokens.to(team.device), targets.to(team.device), recipe, stepper.end_of_text)
        out = stepper.read(part, 0.0)
        assert out.nll is not None
        sums[0] += out.nll.double().sum()
        sums[1] += (part.targets != IGNORE).sum()
        for block, gate in enumerate(out.gates):
            sums[2 + block] += gate.fire.sum()
    nll, scored, *fired = team.sum(sums).tolist()
    mean = finite(nll / max(scored, 1))
    found = {"nll": mean, "perplexity": None if mean is None else perplexity(mean), "tokens": int(scored)}
    return found | ({"fire": [f / (windows * recipe.context) for f in fired]} if fired else {})
