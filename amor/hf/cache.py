"""Our State as the cache that transformers carries from call to call.

A State is a value; a cache of transformers is an object that calls write into. So the object holds
the newest State. To continue twice from one place, copy it: copy.deepcopy(cache).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from amor.errors import AmorError
from amor.state import State


class AmorCache(Cache):
    """What a model remembers of the text so far, as `past_key_values` of transformers.

    Attributes:
        state: the State after the last call; None before the first.
        columns: columns of input read so far, pads included, so that a mask of the whole text and
            the cache agree.
        capacity: columns for which keys and values get memory at once, as in a static cache; 0:
            memory grows with the text.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, state: State | None = None, capacity: int = 0):
        super().__init__(layers=[])
        self.state, self.capacity = state, capacity
        self.columns = 0 if state is None else state.max_position

    def take(self, state: State, columns: int) -> None:
        """Store the State after a call that read so many columns."""
        self.state = state
        self.columns += columns

    def begin(self, state: State) -> State:
        """The State that a first call starts from: an empty one, with memory for `capacity`."""
        return state.reserve(self.capacity) if self.capacity else state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, pads included."""
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of the mask of the next call, and the first one that it covers."""
        return self.columns + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The column of the next token."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, which in transformers means that texts may have any length."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether anything was read."""
        return self.state is not None

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self.state is not None

    @property
    def batch_size(self) -> int:
        """Rows of the batch; 0 before the first call."""
        return 0 if self.state is None else self.state.rows

    def __repr__(self) -> str:
        return f"AmorCache({self.batch_size} rows, {self.columns} columns read)"

    def reset(self) -> None:
        """Forget the text."""
        self.state, self.columns = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order that beam search chose."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n], in that order; one may be taken several times."""
        if self.state is not None:
            self.state = self.state.select(indices.to(self.state.position.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, copies next to each other."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> AmorCache:
        copied = AmorCache(None if self.state is None else self.state.fork(), self.capacity)
        copied.columns = self.columns
        return copied

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, unless nothing is to be removed."""
        if tokens_to_remove:
            instead = "copy.deepcopy(cache) before what may be taken back"
            raise AmorError(f"crop({tokens_to_remove}): {BACKWARDS}; {instead}")

    def activate_past_recording(self) -> None:
        """Refused: it is called by ways of decoding that take tokens back."""
        raise AmorError(
            f"this way of decoding takes tokens back, and {BACKWARDS}; "
            "use greedy, sampling or beam search"
        )

    def update(self, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Refused: transformers' attention layers would call it."""
        raise AmorError(
            "AmorCache holds the state of a whole model, not of a layer; "
            "it is written by the model's forward"
        )


BACKWARDS = "a recurrent state cannot run backwards"
