"""GPU kernels of other packages: whether they can run here, and in which dtype."""

import importlib
import importlib.util

import torch

FLA = "pip install 'flash-linear-attention[cuda]'"
MAMBA = "pip install mamba-ssm --no-build-isolation (compiles with nvcc)"


def absent(package: str, install: str, *modules: str) -> str | None:
    """Why a package's kernels, in `modules`, cannot run here, or None.

    install: the command that brings the package.
    """
    for name in (package, "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; {install}"
    return import_error(*modules) if torch.cuda.is_available() else "torch sees no GPU"


def import_error(*modules: str) -> str | None:
    """Why a module of an installed package cannot be imported, or None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a half-installed package raises anything
            words = (str(error).splitlines() or [""])[0]
            return f"{name} cannot be imported ({type(error).__name__}: {words})"
    return None


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype kernels compute in: inside autocast its own, else that of the data."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else dtype
