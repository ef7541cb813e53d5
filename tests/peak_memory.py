"""Measures the activations of a recipe's micro-batch: peak resident memory of one
forward and backward pass, in bytes.

    MALLOC_MMAP_THRESHOLD_=65536 python tests/peak_memory.py RECIPE KEY=VALUE...

Run alone in a process. The variable makes the allocator give freed tensors back to the system, so
that resident memory is what tensors need.
"""

import sys
from pathlib import Path

import torch

from amor.models.build import build
from amor.models.gated import PassOptions
from amor.train.optim import freeze
from amor.train.recipe import load


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return 1024 * int(
        next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(key)
        ).split()[1]
    )


def measured(recipe_name: str, changes: list[str]) -> int:
    """Bytes above what the process holds after a first pass over a few tokens,
    weights and gradients included."""
    recipe = load(recipe_name, changes)
    model = build(recipe.config(), 0)
    freeze(model, recipe.freeze)
    model.backbone.recompute = recipe.recompute

    def both_passes(rows: int, columns: int) -> None:
        tokens = torch.randint(0, model.config.vocab, (rows, columns))
        loss = model(
            tokens, targets=tokens, options=PassOptions(compute="full_with_mask")
        ).loss  # as if every gate fired
        assert loss is not None
        loss.backward()

    both_passes(1, 64)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    both_passes(recipe.micro_batch, recipe.context)
    return status("VmHWM") - before


if __name__ == "__main__":
    print(measured(sys.argv[1], sys.argv[2:]))
