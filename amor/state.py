"""The state of a model: recurrent states, convolution windows, keys and values, positions.

A State is a value: reading on from it gives a new one and leaves it as it was. Keys and values grow
inside a shared buffer, so that reading on does not copy them (amor/kv.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from amor import tensors, typed
from amor.checks import MOST_LAYERS
from amor.errors import AmorError
from amor.form import Part, StateSpec, shape_error, spec_of
from amor.kv import KV, with_room
from amor.layout import Layout


class StateMetadata(typed.File, frozen=True):
    """The metadata of a saved State, beside its tensors."""

    layers: Annotated[int, Meta(ge=1, le=2 * MOST_LAYERS)]  # its parts: layers, then blocks
    even: bool  # rows_aligned
    # max_position
    longest: Annotated[int, Meta(ge=0, le=2**40)]


class Ownership:
    """Generation counter that detects use of a State whose tensors a step has overwritten.

    Shared by all States of these tensors; only the State of the current generation may read them.
    """

    def __init__(self) -> None:
        self.generation = 0


@dataclass(frozen=True)
class HistoryStep:
    """One call kept for `rollback`: the State before it, and its tokens."""

    before: State
    tokens: Tensor  # [B, T]
    lengths: Tensor | None  # [B] real tokens per row; None: all of them


@dataclass(frozen=True)
class State:
    """Everything a model carries from one call to the next, for a batch of rows."""

    position: Tensor  # [B] tokens each row has read of its current document
    parts: tuple[Part, ...]  # one per layer, then one per block
    rows_aligned: bool = True  # all rows stand at the same position
    max_position: int = 0  # the largest position of a row
    memory: int = 0  # how many tokens can be taken back
    steps: tuple[HistoryStep, ...] = field(default=(), repr=False)  # that hold these tokens
    ownership: Ownership = field(default_factory=Ownership, repr=False, compare=False)
    generation: int = field(default=0, repr=False, compare=False)
    # the specification it was checked against; None for a State made by hand or by replace, which
    # the next model checks
    spec: StateSpec | None = field(default=None, init=False, repr=False, compare=False)

    def check(self, spec: StateSpec) -> None:
        """Refuse a State of another model.

        Compared once: a State that the model computes from one that fits needs no comparison.
        """
        if self.spec is spec:
            return
        wrong = spec.mismatch(spec_of(self.parts)) or self._unsound()
        if wrong:
            raise AmorError(f"this state is not one of this model: {wrong}")
        object.__setattr__(self, "spec", spec)

    def _unsound(self) -> str:
        """Why its tensors and positions contradict each other, or ""."""
        if self.position.ndim != 1 or self.position.dtype != torch.long:
            position = f"{self.position.dtype} of shape {list(self.position.shape)}"
            return f"position is {position}, not one int64 per row"
        for index, part in enumerate(self.parts):
            for name, entry in part.items():
                wrong = shape_error(entry, self.rows, self.max_position)
                if wrong:
                    return f"{name!r} of part {index} {wrong}"
        if self.position.device.type == "meta" or not self.rows:
            return ""
        least, most = (int(t) for t in self.position.aminmax())
        if least < 0 or most != self.max_position or (self.rows_aligned and least != most):
            largest = f"the largest position is given as {self.max_position}"
            every = " for all of them" if self.rows_aligned else ""
            return f"its rows stand at {least} to {most}, but {largest}{every}"
        return ""

    def check_not_consumed(self) -> None:
        """Refuse a State whose recurrent tensors a later step has overwritten in place."""
        if self.generation != self.ownership.generation:
            raise AmorError(
                "this state is gone: a decode session read on from it and wrote over its tensors; "
                "state.fork() before the step keeps both"
            )

    @property
    def rows(self) -> int:
        """The number of rows, B."""
        return len(self.position)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, including spare capacity of key buffers and rollback history."""
        own = sum(entry.nbytes for part in self.parts for entry in part.values())
        recurrent = sum(
            entry.nbytes
            for step in self.steps
            for part in step.before.parts
            for entry in part.values()
            if isinstance(entry, Tensor)
        )
        return own + self.position.nbytes + recurrent

    def layout(self, columns: int, lengths: Tensor | None, reset: Tensor | None) -> Layout:
        """The Layout of a call of `columns` tokens per row that continues this State."""
        self.check_not_consumed()
        return Layout(self.position, columns, self.rows_aligned, self.max_position, lengths, reset)

    def advance(
        self, layout: Layout, parts: Sequence[Part], tokens: Tensor, in_place: bool = False
    ) -> State:
        """The State after a call.

        in_place: the call has overwritten the recurrent tensors, so this State is consumed.
        """
        longest, even = layout.max_position + layout.columns, layout.rows_aligned
        if layout.reset is not None or layout.lengths is not None:
            longest = int(layout.end.max())
            even = bool((layout.end == longest).all())
        after = State(layout.end, tuple(parts), even, longest, self.memory)
        if in_place:
            self.ownership.generation += 1
            after = replace(after, ownership=self.ownership, generation=self.ownership.generation)
        if self.memory:
            if layout.reset is not None:
                raise AmorError(
                    "a state that remembers tokens cannot read packed documents; feed one document "
                    "per row"
                )
            steps = (*self.steps, HistoryStep(replace(self, steps=()), tokens, layout.lengths))
            after = replace(after, steps=_needed(steps, self.memory))
        object.__setattr__(after, "spec", self.spec)
        return after

    def read_on(self, parts: Sequence[Part]) -> State:
        """This State in the middle of a call of its model.

        Some parts have read the token already.
        """
        after = replace(self, parts=tuple(parts))
        object.__setattr__(after, "spec", self.spec)
        return after

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """A new State of changed tensors (batch first in each)."""
        self.check_not_consumed()
        parts = tuple(
            {k: t.map(change) if isinstance(t, KV) else change(t) for k, t in part.items()}
            for part in self.parts
        )
        return State(change(self.position), parts, self.rows_aligned, self.max_position)

    def reserve(self, slots: int) -> State:
        """The same State with capacity for this many tokens per row.

        Until they are read, no key is copied again.
        """
        parts = tuple(
            {k: t.reserve(slots) if isinstance(t, KV) else t for k, t in part.items()}
            for part in self.parts
        )
        return replace(self, parts=parts)

    def detach(self) -> State:
        """The same numbers without their graph: a boundary of truncated backpropagation."""
        return self.map(Tensor.detach)

    def fork(self) -> State:
        """An independent copy: nothing done to one can reach the other."""
        return replace(self.map(Tensor.clone), memory=self.memory)

    def select(self, rows: Sequence[int] | Tensor) -> State:
        """Some rows, in the order given; a row may be taken twice."""
        index = torch.as_tensor(rows, device=self.position.device)
        return self.map(lambda t: t.index_select(0, index))._tight()

    @staticmethod
    def join(states: Sequence[State]) -> State:
        """The rows of several States as one batch."""
        spec = spec_of(states[0].parts)
        for state in states:
            state.check_not_consumed()
            state.check(spec)
        longest = max(s.max_position for s in states)

        def joined(name: str, layer: int) -> Tensor | KV:
            entries = [s.parts[layer][name] for s in states]
            if kvs := [entry for entry in entries if isinstance(entry, KV)]:
                k = torch.cat([with_room(kv.k, longest, exact=True) for kv in kvs])
                v = torch.cat([with_room(kv.v, longest, exact=True) for kv in kvs])
                return KV.of(k, v)
            return torch.cat([entry for entry in entries if isinstance(entry, Tensor)])

        parts = tuple(
            {name: joined(name, i) for name in part} for i, part in enumerate(states[0].parts)
        )
        return State(torch.cat([s.position for s in states]), parts, False, longest)._tight()

    def _tight(self) -> State:
        """The same State with max_position and rows_aligned computed from the positions."""
        longest = int(self.position.max()) if self.rows else 0
        return replace(
            self, max_position=longest, rows_aligned=bool((self.position == longest).all())
        )

    def keep_history(self, tokens: int) -> State:
        """From here on, the last `tokens` tokens can be taken back by `rollback`."""
        return replace(self, memory=tokens, steps=())

    def rollback(self, count: int | Tensor, replay: Callable[..., State]) -> State:
        """The State before the last `count` tokens (a number, or one per row); consumes this one.

        Keys and values are cut; recurrent states cannot run backwards, so the nearest remembered
        State is taken and `replay(tokens, state, lengths)` (the model's own forward) reads again
        what lies between.
        """
        self.check_not_consumed()
        back = torch.as_tensor(count, device=self.position.device).expand(self.rows)
        available = sum((_lengths(s) for s in self.steps), torch.zeros_like(self.position))
        if bool((back < 0).any()) or bool((back > available).any()):
            raise AmorError(
                f"rollback of {back.tolist()} tokens, but {available.tolist()} are remembered; "
                "call state.keep_history(n) before reading what may be taken back"
            )
        if not bool(back.any()):
            return self
        steps = list(self.steps)
        undone = torch.zeros_like(back)
        taken: list[HistoryStep] = []
        while bool((undone < back).any()):
            taken.insert(0, steps.pop())
            undone = undone + _lengths(taken[0])
        state = replace(taken[0].before.cut_from(self), steps=tuple(steps))
        again = undone - back  # tokens a row must read again
        for step in taken:
            now = torch.minimum(again, _lengths(step))
            again = again - now
            columns = int(now.max())
            if columns:
                state = replay(step.tokens[:, :columns], state, now)
        return state

    def cut_from(self, later: State) -> State:
        """This State, taking over the key buffers of the later one that grew from it."""
        parts: list[Part] = []
        for mine, theirs in zip(self.parts, later.parts, strict=True):
            part: Part = {}
            for name, entry in mine.items():
                other = theirs[name]
                if isinstance(entry, KV) and isinstance(other, KV):
                    part[name] = other.claim(self.max_position) if entry.used else entry
                else:
                    part[name] = entry
            parts.append(part)
        return replace(self, parts=tuple(parts))

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file; what `rollback` would need is not kept."""
        from safetensors.torch import save_file

        self.check_not_consumed()
        named = {"position": self.position}
        for layer, part in enumerate(self.parts):
            for name, entry in part.items():
                if isinstance(entry, KV):
                    named[f"{layer}.{name}.k"], named[f"{layer}.{name}.v"] = entry.k, entry.v
                else:
                    named[f"{layer}.{name}"] = entry
        metadata = StateMetadata(
            layers=len(self.parts), even=self.rows_aligned, longest=self.max_position
        )
        save_file(
            {k: t.contiguous().clone() for k, t in named.items()},
            str(path),
            metadata={"amor": typed.line(metadata)},
        )

    @staticmethod
    def load(path: str | Path, device: str | torch.device = "cpu") -> State:
        """A State as `save` wrote it; whether it fits a model is checked where it enters one."""
        path = Path(path)
        try:
            with tensors.opened(path, device) as file:
                text = (file.metadata() or {}).get("amor")
                named = tensors.read(file, tensors.listed(file, path))
        except AmorError as error:
            raise AmorError(
                f"{path} is not a saved state ({error}); write one with state.save(path)"
            ) from None
        if text is None or "position" not in named:
            raise AmorError(
                f"{path} is a safetensors file but not a saved state; write one with "
                "state.save(path)"
            )
        metadata = typed.from_json(StateMetadata, text, f"{path}, its metadata")
        position = named.pop("position")
        tensors.check_finite(named, path)
        state = State(
            position, _parts(named, metadata.layers, path), metadata.even, metadata.longest
        )
        wrong = state._unsound() or ("" if state.rows else "it has no rows")
        if wrong:
            raise AmorError(f"{path} is not a sound state: {wrong}")
        return state


def _parts(named: Mapping[str, Tensor], count: int, path: Path) -> tuple[Part, ...]:
    """The tensors of a file by part: "3.conv", or "3.kv.k" and "3.kv.v"."""
    parts: list[Part] = [{} for _ in range(count)]
    for key, tensor in named.items():
        layer, _, name = key.partition(".")
        if not name or not layer.isdecimal() or len(layer) > 9 or not 0 <= int(layer) < count:
            raise AmorError(
                f"{path}: tensor {key!r} belongs to none of the {count} parts of this state"
            )
        whole = key[:-2]
        if name.endswith((".k", ".v")):
            if f"{whole}.k" not in named or f"{whole}.v" not in named:
                raise AmorError(f"{path}: tensor {key!r} is alone; keys and values come together")
            k, v = named[f"{whole}.k"], named[f"{whole}.v"]
            if k.ndim != 4:
                shape = f"{list(k.shape)}, not [rows, heads, slots, size]"
                raise AmorError(f"{path}: tensor {key!r} has shape {shape}")
            parts[int(layer)][name[:-2]] = KV.of(k, v)
        else:
            parts[int(layer)][name] = tensor
    return tuple(parts)


def _lengths(step: HistoryStep) -> Tensor:
    if step.lengths is not None:
        return step.lengths
    return torch.full_like(step.before.position, step.tokens.shape[1])


def _needed(steps: tuple[HistoryStep, ...], memory: int) -> tuple[HistoryStep, ...]:
    """The newest steps that together hold `memory` tokens of every row."""
    covered = torch.zeros_like(steps[-1].before.position)
    for count, step in enumerate(reversed(steps), 1):
        covered = covered + _lengths(step)
        if bool((covered >= memory).all()):
            return steps[-count:]
    return steps
