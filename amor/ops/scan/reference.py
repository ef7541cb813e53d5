"""The Mamba2 recurrence, one token at a time: the definition.

    s_t = exp(dt_t A) s_{t-1} + (dt_t x_t) B_t^T          y_t = s_t C_t + D x_t

Letters: B rows, T tokens, H heads of size P, G groups of states of size S.
"""

import torch
from torch import Tensor


def scan(
    x: Tensor,  # [B, T, H, P]
    dt: Tensor,  # [B, T, H] step size >= 0; 0 leaves the state as it is: so pads are skipped
    A: Tensor,  # [H] < 0
    B: Tensor,  # [B, T, G, S]
    C: Tensor,  # [B, T, G, S]
    state: Tensor | None = None,  # [B, H, P, S]
    reset: Tensor | None = None,  # [B, T] True: forget before reading this token
    D: Tensor | None = None,  # [H] how much of x passes by the state
) -> tuple[Tensor, Tensor]:  # y [B, T, H, P], state; both float32
    """The outputs of all tokens, and the state after them."""
    rows, _, heads, size = x.shape
    x, dt, A, B, C = x.float(), dt.float(), A.float(), B.float(), C.float()
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))
    s = x.new_zeros(rows, heads, size, B.shape[-1]) if state is None else state.float()
    ys = []
    for t, (x_t, dt_t, B_t, C_t) in enumerate(
        zip(x.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1))
    ):
        if reset is not None:
            s = torch.where(reset[:, t, None, None, None], 0.0, s)
        decay = torch.exp(dt_t * A)[..., None, None]
        s = decay * s + (dt_t[..., None] * x_t)[..., None] @ B_t[:, :, None]
        ys.append((s @ C_t[..., None]).squeeze(-1))
    y = torch.stack(ys, dim=1)
    return y if D is None else y + D.float()[:, None] * x, s
