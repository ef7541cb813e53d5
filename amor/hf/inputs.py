"""What callers of transformers hand to a model, in our words: which tokens are real, where documents begin, what comes next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.hf.cache import AmorCache
from amor.ops.head import IGNORE


def tokens(input_ids: Any, inputs_embeds: Any) -> Tensor:
    if inputs_embeds is not None:
        raise AmorError("inputs_embeds: gates and head belong to tokens, so this model reads input_ids only")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        what = (
            f"{input_ids.dtype} of shape {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise AmorError(f"input_ids: {what}; expected whole numbers of shape [rows, columns]")
    return input_ids.long()


def refuse(**asked: Any) -> None:
    """What a model of transformers may be asked for and ours does not make."""
    for name, value in asked.items():
        if value:
            raise AmorError(f"{name}: this model does not return them; call its core (model.core) or use forward hooks")


def cache(given: Any) -> AmorCache | None:
    if given is None or isinstance(given, AmorCache):
        return given
    raise AmorError(f"past_key_values: {type(given).__name__}; a model of amor reads on from an amor.hf.AmorCache")


def real(mask: Any, read: Tensor, before: AmorCache | None) -> Tensor | None:
    """Which tokens of this call are real, from a mask of this call or of the whole text so far."""
    if mask is None:
        return None
    rows, columns = read.shape
    seen = 0 if before is None else before.columns
    whole = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point()
    if not whole or len(mask) != rows or mask.shape[1] not in (columns, seen + columns):
        given = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise AmorError(f"attention_mask: {given}; expected 0 and 1 of shape [{rows}, {seen + columns}], 0 at pads")
    return mask[:, -columns:].bool()


def documents(positions: Tensor | None, read: Tensor, valid: Tensor | None, before: AmorCache | None) -> Tensor | None:
    """Where packed documents begin, as position_ids tell it. Positions that say nothing new are checked and left."""
    if positions is None:
        return None
    state = None if before is None else before.state
    start = torch.zeros(len(read), dtype=torch.long, device=read.device) if state is None else state.position
    marks = torch.ones_like(read, dtype=torch.bool) if valid is None else valid
    if positions.ndim != 2 or positions.shape[0] not in (1, len(read)) or positions.shape[1] != read.shape[1]:
        raise AmorError(f"position_ids: shape {list(positions.shape)}; expected {list(read.shape)}")
    positions = positions.expand_as(read)
    if bool((positions == start[:, None] + marks.long().cumsum(1) - 1)[marks].all()):
        return None
    begins = positions == 0
    follows = torch.cat([start[:, None], positions[:, :-1] + 1], dim=1)
    if bool(marks.all()) and bool((begins | (positions == follows)).all()):
        return begins
    raise AmorError(
        "position_ids: they neither go on from what was read (pass the attention_mask of the whole text, pads included) "
        "nor count each packed document from 0"
    )


def next_tokens(labels: Tensor) -> Tensor:
    """The target of every token: the label one column further."""
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    return targets
