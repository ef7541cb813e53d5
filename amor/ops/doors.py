"""What the doors to other people's GPU kernels share: is the package here, and is there a GPU to run it."""

import importlib.util

import torch

FLA = "pip install 'flash-linear-attention[cuda]'"
MAMBA = "pip install mamba-ssm --no-build-isolation (compiles with nvcc)"


def absent(package: str, install: str) -> str | None:
    """Why a package's kernels cannot run here, or None."""
    for name in (package, "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; {install}"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype kernels compute in: inside autocast its own, else that of the data."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype
