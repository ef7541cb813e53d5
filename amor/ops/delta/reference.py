"""The gated delta rule, one token at a time: the definition.

    s <- exp(g_t) s      u_t = beta_t (v_t - s^T k_t)      s <- s + k_t u_t^T      o_t = s^T q_t

Letters: B rows, T tokens, H heads, keys of size K, values of size V. The decay exp(g_t) is one
number per head (Gated DeltaNet) or one per channel of the key, that is per row of s (Kimi Delta
Attention, KDA: arXiv 2510.26692).
"""

import torch
from torch import Tensor


def delta(
    q: Tensor,  # [B, T, H, K]
    k: Tensor,  # [B, T, H, K] of length at most 1
    v: Tensor,  # [B, T, H, V]
    g: Tensor,  # [B, T, H] or [B, T, H, K] log decay <= 0
    beta: Tensor,  # [B, T, H] in [0, 1]; g = beta = 0 leaves the state as it is, for pads
    state: Tensor | None = None,  # [B, H, K, V]
    reset: Tensor | None = None,  # [B, T] True: forget before reading this token
) -> tuple[Tensor, Tensor]:  # o [B, T, H, V], state; both float32
    """The outputs of all tokens, and the state after them."""
    q, k, v, g, beta = (t.float() for t in (q, k, v, g, beta))
    g = g[..., None] if g.ndim == 3 else g
    rows, _, heads, size = k.shape
    s = q.new_zeros(rows, heads, size, v.shape[-1]) if state is None else state.float()
    outputs = []
    for t, (q_t, k_t, v_t, g_t, beta_t) in enumerate(
        zip(*(x.unbind(1) for x in (q, k, v, g, beta)))
    ):
        if reset is not None:
            s = torch.where(reset[:, t, None, None, None], 0.0, s)
        s = s * g_t[..., None].exp()
        recalled = (k_t[:, :, None] @ s).squeeze(-2)
        u = beta_t[..., None] * (v_t - recalled)
        s = s + k_t[..., None] @ u[:, :, None]
        outputs.append((q_t[:, :, None] @ s).squeeze(-2))
    return torch.stack(outputs, dim=1), s
