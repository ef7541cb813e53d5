"""The memory of rows in decode: each row has its own, so no row is copied because another moves.

A State is one batch of tensors; there a row that enters or leaves means a copy of all. Here a row
is two runs of memory: its recurrent tensors, one behind the other, and its keys and values, which
grow when the row needs it. Compiled steps find both by a table of addresses
(`amor.decode.tables.StateTable`). A row may belong to several sessions, as after a fork; it is
copied when one of them steps.

Recurrent tensors cannot run backwards. A step that may be taken back (draft tokens, `memory`)
writes them to fresh runs, so taking tokens back is a choice of run: exact, and without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor

from amor.decode.tables import RowTables, StateTable
from amor.errors import AmorError
from amor.form import Part, StateSpec, TensorSpec
from amor.kv import KV
from amor.layout import StepLayout
from amor.state import State

ALIGN = 16  # float32 numbers of a cache line
SPARE = 64  # capacity that a row gains at least when its keys outgrow their memory


@dataclass(frozen=True)
class RowEntry:
    """One tensor, or the keys and values of one attention, in the memory of a row."""

    part: int  # index of the layer, or of the block behind them
    name: str
    shape: tuple[int, ...]  # of a row; of keys [heads, size]
    offset: int  # numbers before it; of keys: per token of capacity

    @property
    def numbers(self) -> int:
        """Numbers of a recurrent tensor; of keys: per token, without the values."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class RowForm:
    """What the memory of every row of a model holds."""

    parts: int  # layers and blocks
    recurrent: tuple[RowEntry, ...]
    keys: tuple[RowEntry, ...]

    @staticmethod
    def of(spec: StateSpec) -> RowForm:
        """The form of rows of States of this specification."""
        entries: list[list[RowEntry]] = [[], []]
        ends = [0, 0]
        for index, part in enumerate(spec.parts):
            for name, tensor in part.items():
                kind, size = int(tensor.keys), _aligned(tensor)
                entries[kind].append(RowEntry(index, name, tensor.shape, ends[kind]))
                ends[kind] += size
        return RowForm(len(spec.parts), tuple(entries[0]), tuple(entries[1]))

    @property
    def recurrent_numbers(self) -> int:
        """Numbers of all recurrent tensors of a row, gaps included."""
        last = self.recurrent[-1:]
        return sum(e.offset + -(-e.numbers // ALIGN) * ALIGN for e in last)

    @property
    def key_numbers(self) -> int:
        """Numbers of all keys and values, per token of capacity."""
        return sum(2 * e.numbers for e in self.keys)


def _aligned(spec: TensorSpec) -> int:
    numbers = int(torch.Size(spec.shape).numel())
    return 2 * numbers if spec.keys else -(-numbers // ALIGN) * ALIGN


@dataclass(eq=False)
class Row:
    """The memory of one row."""

    position: int  # tokens read
    recurrent: Tensor  # all recurrent tensors, float32
    keys: Tensor  # keys, then values, of every attention, [heads, capacity, size] each
    capacity: int  # tokens that `keys` has memory for
    history: list[Tensor] = field(default_factory=list)  # `recurrent` before the last tokens
    holders: WeakSet[RowMemory] = field(default_factory=WeakSet)  # the sessions it belongs to

    def copy(self, form: RowForm) -> Row:
        """An independent copy; runs of history are only read, so both share them."""
        keys = torch.empty(len(self.keys))
        for old, new in zip(self.each_keys(form), _each(form, keys, self.capacity), strict=True):
            new[:, : self.position] = old[:, : self.position]
        return Row(self.position, self.recurrent.clone(), keys, self.capacity, [*self.history])

    def grow(self, form: RowForm, capacity: int) -> None:
        """Move keys and values to memory for `capacity` tokens."""
        keys = torch.empty(form.key_numbers * capacity)
        for old, new in zip(self.each_keys(form), _each(form, keys, capacity), strict=True):
            new[:, : self.position] = old[:, : self.position]
        self.keys, self.capacity = keys, capacity

    def each_keys(self, form: RowForm) -> list[Tensor]:
        """Keys, then values, of each attention: [heads, capacity, size]."""
        return _each(form, self.keys, self.capacity)

    def each_recurrent(self, form: RowForm) -> list[Tensor]:
        """Each recurrent tensor."""
        return [
            self.recurrent[e.offset : e.offset + e.numbers].view(e.shape) for e in form.recurrent
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of this row, spare capacity and history included."""
        return self.keys.nbytes + self.recurrent.nbytes + sum(t.nbytes for t in self.history)


def _each(form: RowForm, run: Tensor, capacity: int) -> list[Tensor]:
    views = []
    for e in form.keys:
        size = e.numbers * capacity
        first = e.offset * capacity
        for start in (first, first + size):
            views.append(run[start : start + size].view(e.shape[0], capacity, e.shape[1]))
    return views


class RowMemory:
    """The rows of one session."""

    def __init__(self, form: RowForm, rows: Sequence[Row], memory: int = 0):
        """memory: how many tokens a rollback may take back."""
        self.form, self.memory = form, memory
        self.rows: list[Row] = []
        for row in rows:  # a row that is taken twice becomes two
            self.rows.append(row.copy(form) if self in row.holders else row)
            self.rows[-1].holders.add(self)
        self.position = torch.tensor([row.position for row in self.rows])
        self._tables: RowTables | None = None  # of steps in place
        self._free = 0  # tokens for which every row has memory
        self._after: list[list[Tensor]] = []  # per row, runs that the step being judged wrote
        self._spare: list[Tensor] = []  # runs that nothing refers to

    @staticmethod
    def of(form: RowForm, state: State, room: int = 0, memory: int = 0) -> RowMemory:
        """Copies of the rows of a State, each with memory for `room` more tokens."""
        state.check_not_consumed()
        rows = []
        for index, position in enumerate(state.position.tolist()):
            recurrent, capacity = torch.zeros(form.recurrent_numbers), position + room
            row = Row(position, recurrent, torch.empty(form.key_numbers * capacity), capacity)
            for entry, mine in zip(form.recurrent, row.each_recurrent(form), strict=True):
                tensor = state.parts[entry.part][entry.name]
                assert isinstance(tensor, Tensor)
                mine.copy_(tensor[index])
            every = row.each_keys(form)
            for entry, k, v in zip(form.keys, every[::2], every[1::2], strict=True):
                kv = state.parts[entry.part][entry.name]
                assert isinstance(kv, KV)
                k[:, :position] = kv.k[index, :, :position]
                v[:, :position] = kv.v[index, :, :position]
            rows.append(row)
        return RowMemory(form, rows, memory)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, those of other sessions too that share one."""
        return sum(row.nbytes for row in self.rows) + sum(t.nbytes for t in self._spare)

    def state(self) -> State:
        """A State of copies of the rows."""
        parts: list[Part] = [{} for _ in range(self.form.parts)]
        for index, entry in enumerate(self.form.recurrent):
            every = [row.each_recurrent(self.form)[index] for row in self.rows]
            parts[entry.part][entry.name] = torch.stack(every)
        longest = max((row.position for row in self.rows), default=0)
        for index, entry in enumerate(self.form.keys):
            heads, size = entry.shape
            both = torch.zeros(2, len(self.rows), heads, longest, size)
            for number, row in enumerate(self.rows):
                for side, keys in zip(both, row.each_keys(self.form)[2 * index :][:2], strict=True):
                    side[number, :, : row.position] = keys[:, : row.position]
            parts[entry.part][entry.name] = KV.of(*both)
        aligned = all(row.position == longest for row in self.rows)
        return State(self.position.clone(), tuple(parts), aligned, longest)

    def select(self, rows: Sequence[int]) -> RowMemory:
        """Some rows, in the order given; nothing is copied now."""
        self._tables = None  # rows are shared from here on
        return RowMemory(self.form, [self.rows[r] for r in rows], self.memory)

    def join(self, *others: RowMemory) -> RowMemory:
        """These rows, then those of others; nothing is copied now."""
        for each in (self, *others):
            each._tables = None
        every = [row for memory in (self, *others) for row in memory.rows]
        return RowMemory(self.form, every, self.memory)

    def reserve(self, room: int) -> None:
        """Memory for this many more tokens of every row."""
        self._own()
        for row in self.rows:
            if row.capacity < row.position + room:
                row.grow(self.form, row.position + room)
        self._tables = None

    def step_in_place(self) -> tuple[RowTables, StepLayout]:
        """Tables and layout of a step of one token per row that will not be taken back."""
        if self._tables is None or not self._free:
            self._own()
            self._make_room([1] * len(self.rows))
            before = [row.recurrent.data_ptr() for row in self.rows]
            self._tables = self._tabled(before, before, list(range(len(self.rows))))
            self._free = min((row.capacity - row.position for row in self.rows), default=0)
        layout = StepLayout(self.position, 1, False, int(self.position.max()))
        self._free -= 1
        for row in self.rows:
            row.position += 1
        self.position = self.position + 1
        return self._tables, layout

    def step_ahead(self, lengths: Sequence[int]) -> tuple[RowTables, StepLayout]:
        """Tables and layout of a step of several tokens per row, of which `accept` keeps the first.

        The tokens of a row are neighbours in the batch of the step.
        """
        self._own()
        self._make_room(lengths)
        self._tables = None
        self._after = [[self._run() for _ in range(n)] for n in lengths]
        before, after, index, chains = [], [], [], [0]
        for number, (row, runs) in enumerate(zip(self.rows, self._after, strict=True)):
            places = [row.recurrent.data_ptr(), *(run.data_ptr() for run in runs)]
            before += places[:-1]
            after += places[1:]
            index += [number] * len(runs)
            chains.append(len(index))
        positions = [row.position + t for row, n in zip(self.rows, lengths) for t in range(n)]
        layout = StepLayout(
            torch.tensor(positions), 1, False, max(positions), chains=torch.tensor(chains)
        )
        return self._tabled(before, after, index), layout

    def accept(self, counts: Sequence[int]) -> None:
        """Keep the first tokens of every row of the last `step_ahead`, at least one."""
        for row, runs, count in zip(self.rows, self._after, counts, strict=True):
            if not 1 <= count <= len(runs):
                raise AmorError(f"{count} tokens accepted of {len(runs)} that a row read")
            past = [row.recurrent, *runs[: count - 1]]
            row.recurrent, row.position = runs[count - 1], row.position + count
            self._spare += runs[count:]
            if self.memory:
                row.history = (row.history + past)[-self.memory :]
            else:
                self._spare += past
        self._after, self._tables = [], None
        self.position = torch.tensor([row.position for row in self.rows])

    def rollback(self, counts: Sequence[int]) -> None:
        """Take back the last tokens of every row, at most `memory` of them."""
        available = [len(row.history) for row in self.rows]
        if any(not 0 <= n <= most for n, most in zip(counts, available, strict=True)):
            raise AmorError(
                f"rollback of {list(counts)} tokens, but {available} are remembered; call "
                "prefill(memory=n) before reading what may be taken back"
            )
        self._own()
        for row, count in zip(self.rows, counts, strict=True):
            if count:
                row.recurrent, row.position = row.history[-count], row.position - count
                del row.history[-count:]
        self._tables = None
        self.position = torch.tensor([row.position for row in self.rows])

    def _own(self) -> None:
        """Copy the rows that another session holds too."""
        for number, row in enumerate(self.rows):
            if len(row.holders) > 1:
                row.holders.discard(self)
                self.rows[number] = row.copy(self.form)
                self.rows[number].holders.add(self)

    def _make_room(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            if self.form.keys and row.capacity < row.position + length:
                row.grow(self.form, max(row.position + length, row.capacity * 3 // 2, SPARE))
            elif not self.form.keys:
                row.capacity = row.position + length + SPARE

    def _run(self) -> Tensor:
        """Memory for the recurrent tensors of a row."""
        return self._spare.pop() if self._spare else torch.empty(self.form.recurrent_numbers)

    def _tabled(
        self, before: Sequence[int], after: Sequence[int], index: Sequence[int]
    ) -> RowTables:
        """Addresses of every entry, per token of the step.

        before, after: addresses of the runs that it reads and writes; index: its row.
        """
        tables = RowTables({} for _ in range(self.form.parts))
        runs = torch.tensor([before, after])
        for entry in self.form.recurrent:
            read, written = (runs + 4 * entry.offset).unbind()
            tables[entry.part][entry.name] = StateTable(read, written)
        if self.form.keys:
            every = torch.tensor([[row.keys.data_ptr(), row.capacity] for row in self.rows])
            place, capacity = every[list(index)].T.contiguous()
            for entry in self.form.keys:
                keys = place + 4 * entry.offset * capacity
                values = keys + 4 * entry.numbers * capacity
                tables[entry.part][entry.name] = StateTable(keys, values, capacity)
        return tables
