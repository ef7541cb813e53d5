"""Linear layers without bias: the definition."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linears(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """x W^T for every W; those of a group stand side by side in one result.

    x [..., D], W [n, D] -> [..., sum of n] per group.
    """
    return tuple(joined([F.linear(x, weight) for weight in group]) for group in groups)


def joined(group: Sequence[Tensor]) -> Tensor:
    """Results side by side; one alone is not copied."""
    return group[0] if len(group) == 1 else torch.cat(list(group), dim=-1)
