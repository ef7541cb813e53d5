"""Decays inside the chunks of a recurrence in matrix form, in torch; `scan` and `delta` share them.

A decay is exp of a difference of running sums that is never positive, so it underflows to 0 and
nothing is divided. The sums are float64: after a decay of e^-10000 the next ones still differ.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Decays(NamedTuple):
    """For chunks of Q tokens; [B, n, H, ...] in float32."""

    between: Tensor  # [.., Q, Q] from after token s to token t; 0 for s > t and across documents
    since: Tensor  # [.., Q] from the chunk's start to a token
    until: Tensor  # [.., Q] from after a token to the chunk's end
    carry: Tensor  # [..] through the whole chunk


def decays(logs: Tensor, reset: Tensor | None) -> Decays:
    """logs [B, n, H, Q]: log decay of every token, <= 0; reset [B, n, Q]: a document begins."""
    wide = torch.float32 if logs.device.type == "mps" else torch.float64  # Metal has no float64
    # cast first: the gradient of cumsum(dtype=) sums in the narrow dtype
    total = logs.to(wide).cumsum(-1)
    chunk = logs.shape[-1]
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=logs.device).tril()
    since, until = total.float().exp(), (total[..., -1:] - total).float().exp()
    carry = since[..., -1]
    if reset is not None:
        document = reset.long().cumsum(-1)[:, :, None]  # [B, n, 1, Q]
        allowed = allowed & (document[..., :, None] == document[..., None, :])
        since = since * (document == 0)
        until = until * (document == document[..., -1:])
        carry = carry * (document[..., -1] == 0)
    apart = (total[..., :, None] - total[..., None, :]).float()
    return Decays(apart.masked_fill(~allowed, -torch.inf).exp(), since, until, carry)


def cut(t: Tensor, chunk: int) -> Tensor:
    """[B, T, ...] -> [B, n, Q, ...] in float32, with zeros behind the end of the last chunk.

    Zeros keep the state as it is: nothing decays and nothing is added.
    """
    pad = -t.shape[1] % chunk
    t = t if t.dtype == torch.bool else t.float()
    t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)) if pad else t
    return t.unflatten(1, (-1, chunk))
