"""The short causal depthwise convolution and its SiLU, tap by tap: the definition.

y_t = silu(bias + sum_j w_j x_{t - (k-1) + j})          taps before the document's start read 0
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def conv(
    x: Tensor,  # [B, T, C]
    weight: Tensor,  # [C, k], the last tap meets the newest token
    bias: Tensor | None = None,  # [C]
    window: Tensor | None = None,  # [B, k - 1, C] the inputs just before x
    lengths: Tensor | None = None,  # [B] real tokens per row, the rest is padding on the right
    reset: Tensor | None = None,  # [B, T] True: a document begins here
) -> tuple[Tensor, Tensor]:  # y [B, T, C], window
    """The convolution of x after a window, and the window after it."""
    rows, length, channels = x.shape
    reach = weight.shape[1] - 1
    past = x.new_zeros(rows, reach, channels) if window is None else window.to(x.dtype)
    both = torch.cat([past, x], dim=1)
    segment = segments(reset, reach)
    y = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)
    for tap in range(reach + 1):
        seen = both[:, tap : tap + length]
        if segment is not None:
            seen = seen * (segment[:, tap : tap + length] == segment[:, reach:])[..., None]
        y = y + seen * weight[:, tap]
    return F.silu(y), last_inputs(both, reach, lengths, segment)


def segments(reset: Tensor | None, reach: int) -> Tensor | None:
    """[B, k - 1 + T] documents begun so far, for the window and the call; 0: that of the window."""
    if reset is None:
        return None
    return torch.cat(
        [torch.zeros_like(reset[:, :1]).long().expand(-1, reach), reset.long().cumsum(1)], dim=1
    )


def last_inputs(both: Tensor, reach: int, lengths: Tensor | None, segment: Tensor | None) -> Tensor:
    """[B, k - 1, C] what the next call must see: each row's last inputs of its last document."""
    count = both.shape[1] - reach
    if lengths is None and segment is None:
        return both[:, count:]
    start = torch.full((len(both),), count, device=both.device) if lengths is None else lengths
    index = start[:, None] + torch.arange(reach, device=both.device)
    kept = both.gather(1, index[..., None].expand(-1, -1, both.shape[2]))
    if segment is None:
        return kept
    newest = segment.gather(1, (start + reach - 1)[:, None])
    return kept * (segment.gather(1, index) == newest)[..., None]
