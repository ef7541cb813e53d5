"""A published folder run by transformers, in float32: what a conversion is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amor.bench.transformers import library
from amor.errors import AmorError


def quiet() -> Any:
    """transformers without its bars of progress."""
    transformers = library()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def by_transformers(folder: Path, name: str, tokens: Tensor) -> tuple[Tensor, str]:
    """Logits [B, T, V] of the class `name`, and what ran it."""
    out, by = run_by_transformers(folder, name, tokens)
    return out.logits, by


@torch.no_grad()
def run_by_transformers(folder: Path, name: str, tokens: Tensor) -> tuple[Any, str]:
    """All that the class `name` gives for tokens [B, T], and what ran it."""
    transformers = quiet()
    try:
        model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (ValueError, OSError, RuntimeError) as error:
        raise AmorError(f"{folder}: transformers cannot open it ({' '.join(str(error).split())[:300]})") from None
    return model.eval()(tokens, use_cache=False), f"transformers {transformers.__version__}"
