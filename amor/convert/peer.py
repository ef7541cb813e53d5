"""The door to transformers, and a published folder run by it in float32, which a conversion is compared with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor.errors import AmorError


def library() -> Any:
    """transformers, without its warnings and progress bars; an error that names the extra where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise AmorError('transformers is needed here, and not installed; pip install "amor[peers]"')
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def by_transformers(folder: Path, name: str, tokens: Tensor) -> tuple[Tensor, str]:
    """Logits [B, T, V] of the class `name`, and what ran it."""
    out, by = run_by_transformers(folder, name, tokens)
    return out.logits, by


@torch.no_grad()
def run_by_transformers(folder: Path, name: str, tokens: Tensor) -> tuple[Any, str]:
    """All that the class `name` gives for tokens [B, T], and what ran it."""
    transformers = library()
    try:
        model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (ValueError, OSError, RuntimeError) as error:
        raise AmorError(f"{folder}: transformers cannot open it ({' '.join(str(error).split())[:300]})") from None
    return model.eval()(tokens, use_cache=False), f"transformers {transformers.__version__}"
