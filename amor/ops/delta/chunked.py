"""The gated delta rule in matrix form: inside a chunk one triangular solve, from chunk to chunk its state.

With D the decays inside a chunk (never above 1), the corrected values u solve (I + tril(beta (k k^T) D, -1)) u = beta (v - k s).
Memory beyond inputs and outputs, in floats: T H (3 chunk + 2 K + 3 V); linear in T.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    rows, length, heads, size = k.shape
    chunk = min(chunk, length)
    count = -(-length // chunk)
    pad = count * chunk - length

    def cut(t: Tensor) -> Tensor:  # [B, T, H, *] -> [B, n, H, chunk, *] in float32; pads are zeros and hold the state
        t = t.float()
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)) if pad else t
        return t.unflatten(1, (count, chunk)).transpose(2, 3)

    q_, k_, v_ = cut(q), cut(k), cut(v)
    g_, beta_ = cut(g[..., None])[..., 0], cut(beta[..., None])
    total = g_.cumsum(-1)
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    since, until = total.exp(), (total[..., -1:] - total).exp()
    carry = since[..., -1]
    if reset is not None:
        seen = F.pad(reset, (0, pad)) if pad else reset
        segment = seen.unflatten(1, (count, chunk)).long().cumsum(-1)[:, :, None]
        allowed = allowed & (segment[..., :, None] == segment[..., None, :])
        since = since * (segment == 0)
        until = until * (segment == segment[..., -1:])
        carry = carry * (segment[..., -1] == 0)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~allowed, -torch.inf).exp()

    system = (beta_ * (k_ @ k_.mT) * decay).tril(-1)
    right = torch.cat([beta_ * v_, beta_ * since[..., None] * k_], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, against = solved.split([v_.shape[-1], size], dim=-1)  # u = own - against @ s
    scores = (q_ @ k_.mT) * decay
    asked, kept = q_ * since[..., None], (k_ * until[..., None]).mT

    s = q.new_zeros(rows, heads, size, v.shape[-1], dtype=torch.float32) if state is None else state.float()
    outputs = []
    for i in range(count):
        u = own[:, i] - against[:, i] @ s
        outputs.append(asked[:, i] @ s + scores[:, i] @ u)
        s = carry[:, i, :, None, None] * s + kept[:, i] @ u
    o = torch.stack(outputs, dim=1)
    return o.transpose(2, 3).flatten(1, 2)[:, :length], s
