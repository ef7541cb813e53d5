"""The harness's own model, to stand beside ours: any model of transformers, as `lm_eval --model hf`
runs it."""

from __future__ import annotations

import importlib.util
from typing import Any

from amor.errors import AmorError


def hflm(model: Any, tokenizer: Any, rows: int, most: int) -> Any:
    """rows: requests at a time; most: tokens of one, at the most."""
    for package in ("lm_eval", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise AmorError(
                f"the harness's own model needs {package}: pip install lm-eval accelerate"
            )
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=rows, max_length=most, add_bos_token=False
    )
