"""The Mamba2 recurrence by mamba-ssm's Triton kernels (2.2 and later), on a GPU.

Products run in the dtype of x (bfloat16 in training), sums and states in float32. A reset starts a
new `seq_idx`; the state handed in belongs to seq_idx 0, the document of a row without a reset so
far.
"""

import torch
from torch import Tensor

from amor.ops import doors

CHUNK = 256  # mamba-ssm's own default, tuned by its authors


def missing() -> str | None:
    """Why this backend cannot run here (no GPU, say), or None."""
    modules = (
        f"mamba_ssm.ops.triton.{name}" for name in ("ssd_combined", "selective_state_update")
    )
    return doors.absent("mamba_ssm", doors.MAMBA, *modules)


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
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    learns = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, dt, A, B, C, state, D)
    )
    if x.shape[1] == 1 and state is not None and reset is None and not learns:
        return step(x, dt, A, B, C, state, D)
    x, B, C = (t.to(doors.kernel_dtype(x.dtype)).contiguous() for t in (x, B, C))
    y, after = mamba_chunk_scan_combined(
        x,
        dt.float().contiguous(),
        A.float(),
        B,
        C,
        CHUNK,
        D=None if D is None else D.float(),
        initial_states=None if state is None else state.float(),
        seq_idx=None if reset is None else reset.cumsum(1, dtype=torch.int32),
        return_final_states=True,
    )
    return y.float(), after.float()


def step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row without a gradient, by the kernel made for it."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    after = state.float().clone()  # the kernel writes in place
    heads, size = x.shape[2:]
    # by strides of 0 the kernel sees that a head has one decay; it needs dt_bias and D, so zeros
    # are given for them
    decay = A.float()[:, None, None].expand(heads, size, B.shape[3])
    nothing = torch.zeros(heads, 1, device=x.device).expand(heads, size)
    skip = nothing if D is None else D.float()[:, None].expand(heads, size)
    steps = dt[:, 0].float()[..., None].expand(-1, heads, size)
    given = x[:, 0].contiguous(), steps, decay, B[:, 0].contiguous(), C[:, 0].contiguous()
    return selective_state_update(after, *given, D=skip, dt_bias=nothing)[:, None].float(), after
