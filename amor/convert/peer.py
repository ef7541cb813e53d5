"""A published folder run by transformers in float32, for comparison with ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor.errors import AmorError, install_hint


def library() -> Any:
    """The module transformers, without its warnings and progress bars.

    Where it is not installed, an error that names the extra.
    """
    if importlib.util.find_spec("transformers") is None:
        raise AmorError(f"transformers is needed here, and not installed: {install_hint('peers')}")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def run_by_transformers(folder: Path, name: str, tokens: Tensor) -> tuple[Any, str]:
    """The outputs of the class `name` for tokens [B, T], and the version that ran it."""
    transformers = library()
    try:
        model = getattr(transformers, name).from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        outputs = model.eval()(tokens, use_cache=False)
    except (AmorError, MemoryError):
        raise
    except Exception as error:
        # its classes raise whatever a wrong value of config.json leads to: AttributeError, KeyError
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise AmorError(f"{folder}: transformers cannot run it ({reason[:300]})") from None
    return outputs, f"transformers {transformers.__version__}"
