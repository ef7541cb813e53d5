"""Linear layers without bias: the definition."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linears(x: Tensor, groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """x W^T for every W; those of a group stand side by side in one result. x [..., D], W [n, D] -> [..., sum of n]."""
    found = ([F.linear(x, weight) for weight in group] for group in groups)
    return tuple(group[0] if len(group) == 1 else torch.cat(group, dim=-1) for group in found)
