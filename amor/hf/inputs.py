"""Inputs of a model of transformers as inputs of ours: tokens, which of them are real, where
documents begin, targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amor.errors import AmorError
from amor.hf.cache import AmorCache
from amor.ops.head import IGNORE


def tokens(input_ids: Any, inputs_embeds: Any) -> Tensor:
    """The tokens [B, T] of a call; embeddings are refused."""
    if inputs_embeds is not None:
        raise AmorError(
            "inputs_embeds: gates and head belong to tokens, so this model reads input_ids only"
        )
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        form = _form(input_ids)
        raise AmorError(f"input_ids: {form}; expected whole numbers of shape [rows, columns]")
    return input_ids.long()


def _form(value: Any) -> str:
    """Dtype and shape of a tensor, the type of anything else."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return type(value).__name__


def refuse(output_attentions: bool | None, output_hidden_states: bool | None) -> None:
    """Raise for outputs that models of transformers may return and ours do not compute."""
    if output_attentions or output_hidden_states:
        name = "output_attentions" if output_attentions else "output_hidden_states"
        instead = "call its core (model.core) or use forward hooks"
        raise AmorError(f"{name}: this model does not return them; {instead}")


def cache(past: Any) -> AmorCache | None:
    """The cache of a call; one of another class is refused."""
    if past is None or isinstance(past, AmorCache):
        return past
    kind = type(past).__name__
    raise AmorError(f"past_key_values: {kind}; a model of amor reads on from an amor.hf.AmorCache")


def real(mask: Any, read: Tensor, before: AmorCache | None) -> Tensor | None:
    """Which tokens of this call are real, from a mask of this call or of the whole text so far."""
    if mask is None:
        return None
    rows, columns = read.shape
    total = columns + (0 if before is None else before.columns)
    whole = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point()
    if not whole or len(mask) != rows or mask.shape[1] not in (columns, total):
        wanted = f"0 and 1 of shape [{rows}, {total}], 0 at pads"
        raise AmorError(f"attention_mask: {_form(mask)}; expected {wanted}")
    return mask[:, -columns:].bool()


def documents(
    positions: Tensor | None, read: Tensor, valid: Tensor | None, before: AmorCache | None
) -> Tensor | None:
    """Where packed documents begin according to position_ids; None where they only count on."""
    if positions is None:
        return None
    state = None if before is None else before.state
    start = torch.zeros_like(read[:, 0]) if state is None else state.position
    marks = torch.ones_like(read, dtype=torch.bool) if valid is None else valid
    if tuple(positions.shape) not in ((1, read.shape[1]), tuple(read.shape)):
        raise AmorError(f"position_ids: shape {list(positions.shape)}; expected {list(read.shape)}")
    positions = positions.expand_as(read)
    if bool((positions == start[:, None] + marks.long().cumsum(1) - 1)[marks].all()):
        return None
    begins = positions == 0
    follows = torch.cat([start[:, None], positions[:, :-1] + 1], dim=1)
    if bool(marks.all()) and bool((begins | (positions == follows)).all()):
        return begins
    raise AmorError(
        "position_ids: they neither go on from what was read (pass the attention_mask of the whole "
        "text, pads included) nor count each packed document from 0"
    )


def next_tokens(labels: Tensor) -> Tensor:
    """The target of every token: the label one column further."""
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    return targets
