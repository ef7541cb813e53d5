"""The gated delta rule by flash-linear-attention's Triton kernels (0.6 and later), on a GPU.

A decay per channel by those of KDA. Products run in the dtype of v (bfloat16 in training), sums and
states in float32. Resets become fla's `cu_seqlens`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from amor.ops import doors
from amor.ops.documents import documents


def missing() -> str | None:
    """Why this backend cannot run here (no GPU, say), or None."""
    return doors.absent("fla", doors.FLA, "fla.ops.gated_delta_rule", "fla.ops.kda")


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    rows, length, heads, size = k.shape
    inputs = [t.to(doors.kernel_dtype(v.dtype)) for t in (q, k, v)] + [g.float(), beta.float()]
    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*inputs, state)
    )
    chunked, recurrent = kernels(by_channel=g.ndim == 4)
    kernel = chunked if learns or length > 1 else recurrent  # the latter has no gradient
    s = (
        k.new_zeros(rows, heads, size, v.shape[3], dtype=torch.float32)
        if state is None
        else state.float()
    )
    pieces = None if reset is None else documents(reset)
    if pieces is not None:
        inputs, s = [t.flatten(0, 1)[None] for t in inputs], pieces.states(s)
    names = dict(zip(("q", "k", "v", "g", "beta"), inputs))
    bounds = None if pieces is None else pieces.bounds
    o, after = kernel(
        **names, scale=1.0, initial_state=s, output_final_state=True, cu_seqlens=bounds
    )
    if pieces is not None:
        o, after = o[0].unflatten(0, (rows, length)), after[pieces.last]
    return o.float(), after.float()


def kernels(
    by_channel: bool,
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]:
    """The kernels for many tokens and for one; all four have the same signature."""
    if by_channel:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        return chunk_kda, fused_recurrent_kda
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    return chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
