"""Packed documents for kernels that take a flat list of sequences, fla's `cu_seqlens`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Rows laid end to end and cut at every row's start and every reset."""

    bounds: Tensor  # [N + 1] where each piece begins, and the end
    row: Tensor  # [N] the row a piece lies in
    continues: Tensor  # [N] True: the piece reads on from its row's state
    last: Tensor  # [B] the index of each row's last piece

    def states(self, state: Tensor) -> Tensor:
        """[N, ...] the state each piece begins with: its row's, or zeros."""
        shape = (-1,) + (1,) * (state.ndim - 1)
        return torch.where(self.continues.view(shape), state[self.row], 0.0)


def documents(reset: Tensor) -> Documents:
    """The pieces of rows whose documents begin at `reset` [B, T]."""
    rows, length = reset.shape
    begins = reset.clone()
    begins[:, 0] = True
    row, column = begins.nonzero(as_tuple=True)
    bounds = torch.cat([row * length + column, row.new_tensor([rows * length])])
    last = (
        torch.searchsorted(row.contiguous(), torch.arange(rows, device=row.device), right=True) - 1
    )
    return Documents(bounds, row, ~reset[row, column], last)
