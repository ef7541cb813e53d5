"""The Mamba2 recurrence in matrix form: inside a chunk by matrix products, from chunk to chunk by its state.

Decays are exp of a difference of cumulative sums that is never positive, so they underflow to 0 and nothing is divided.
Memory beyond inputs and outputs, in floats: T H (chunk + 2 P) + (T / chunk) H P S; linear in T.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # best of 16, 32, 64, 128, 256 at the 180M shape on a two-core AVX2 machine


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    D: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    rows, length, heads, size = x.shape
    groups, width = B.shape[2:]
    chunk = min(chunk, length)
    count = -(-length // chunk)
    pad = count * chunk - length

    def cut(t: Tensor) -> Tensor:  # [B, T, h, *] -> [B, n, h, chunk, *] in float32; a pad has dt = 0 and holds the state
        t = t.float()
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)) if pad else t
        return t.unflatten(1, (count, chunk)).transpose(2, 3)

    dt_, B_, C_ = cut(dt[..., None])[..., 0], cut(B), cut(C)
    fed = cut(x) * dt_[..., None]  # [B, n, H, chunk, P]
    total = torch.cumsum(dt_ * A.float()[:, None], dim=-1)  # [B, n, H, chunk] log decay since the chunk began
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    since, until = total.exp(), (total[..., -1:] - total).exp()  # decay from the chunk's start, to its end
    carry = since[..., -1]
    if reset is not None:
        seen = F.pad(reset, (0, pad)) if pad else reset
        segment = seen.unflatten(1, (count, chunk)).long().cumsum(-1)[:, :, None]  # [B, n, 1, chunk]
        allowed = allowed & (segment[..., :, None] == segment[..., None, :])
        since = since * (segment == 0)
        until = until * (segment == segment[..., -1:])
        carry = carry * (segment[..., -1] == 0)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~allowed, -torch.inf).exp()

    def shared(t: Tensor) -> Tensor:  # [B, n, G, ...] -> every head of a group sees the same
        return t[:, :, :, None].expand(-1, -1, -1, heads // groups, *t.shape[3:]).flatten(2, 3)

    inside = (shared(C_ @ B_.mT) * decay) @ fed
    gathered = (fed * until[..., None]).mT @ shared(B_)  # [B, n, H, P, S] what each chunk adds to the state
    s = x.new_zeros(rows, heads, size, width, dtype=torch.float32) if state is None else state.float()
    befores = []
    for i in range(count):
        befores.append(s)
        s = carry[:, i, :, None, None] * s + gathered[:, i]
    before = torch.stack(befores, dim=1)
    y = inside + (shared(C_) @ before.mT) * since[..., None]
    y = y.transpose(2, 3).flatten(1, 2)[:, :length]
    return y if D is None else y + D.float()[:, None] * x.float(), s
