"""The Mamba2 recurrence by flash-linear-attention's Triton kernels (0.6 and later), on a GPU.

As gated linear attention with q = C, k = B, v = dt x and log decay dt A. Heads of a group get their
own copies of B and C, so mamba_ssm comes first. Products run in the dtype of x (bfloat16 in
training), sums and states in float32. Resets become fla's `cu_seqlens`.
"""

import torch
from torch import Tensor

from amor.ops import doors
from amor.ops.documents import documents


def missing() -> str | None:
    """Why this backend cannot run here (no GPU, say), or None."""
    return doors.absent("fla", doors.FLA, "fla.ops.simple_gla")


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.py defines it."""
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    rows, length, heads, size = x.shape
    dt, each = dt.float(), heads // B.shape[2]
    wide = doors.kernel_dtype(x.dtype)
    queries, keys = (t.repeat_interleave(each, dim=2).to(wide) for t in (C, B))
    inputs = [queries, keys, (x.float() * dt[..., None]).to(wide), dt * A.float()]
    s = (
        x.new_zeros(rows, heads, size, B.shape[3], dtype=torch.float32)
        if state is None
        else state.float()
    )
    pieces = None if reset is None else documents(reset)
    if pieces is not None:
        inputs, s = [t.flatten(0, 1)[None] for t in inputs], pieces.states(s)
    kernel = chunk_simple_gla if length > 1 else fused_recurrent_simple_gla
    names = dict(zip(("q", "k", "v", "g"), inputs))
    bounds = None if pieces is None else pieces.bounds
    y, after = kernel(
        **names,
        scale=1.0,
        initial_state=s.mT.contiguous(),
        output_final_state=True,
        cu_seqlens=bounds,
    )
    if pieces is not None:
        y, after = y[0].unflatten(0, (rows, length)), after[pieces.last]
    y = y.float()
    return y if D is None else y + D.float()[:, None] * x.float(), after.float().mT.contiguous()
