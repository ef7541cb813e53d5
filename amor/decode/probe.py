"""What the head says in one step: read once for every probe to come, and again only for rows that fired.

Block k's input and the output's are known in advance as long as no block fires. In decode the head is limited by the
memory it is read from, so one pass serves all of them. A reading belongs to the vector it was made of: it stands while
that vector's bits stand, so a row that fires is read again and no other.

The 8-bit head gives an entropy and a bound on its error. Where the gate decides alike at both ends, that is its decision.
Where it does not, the exact logits of the likeliest tokens narrow the bound; where that is not enough, the exact head is
read. Where only the best next token is wanted, the 8-bit head serves the output too: it leaves a handful of tokens that could
be the best, and their exact logits decide. It is asked while that is expected to pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.decode.head import Head
from amor.decode.savings import Savings
from amor.errors import AmorError
from amor.gates.base import Evidence, Gate
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.probe import Residuals, Separate
from amor.ops.product import ROWS, probe
from amor.ops.product.best import best
from amor.ops.product.refine import refine

SURELY = 0.7  # share of firings that another one has to follow for blocks to be run as if they fired


@dataclass(frozen=True)
class Said:
    """What a head said of one vector."""

    entropy: float  # over log(vocab)
    off: float = 0.0  # how far it may be from the exact one
    margin: float = 0.0
    logits: Tensor | None = None  # [V] where they were wanted


@dataclass
class Reading:
    """What one head said of one column: it stands for rows whose vectors' bits are still those that were read."""

    x: Tensor  # [R, D]
    said: list[Said | None]  # None for rows that were not read
    logits: Tensor | None = None  # [R, V] where all rows were read at once

    def of(self, x: Tensor) -> list[Said | None]:
        """What it says of these vectors."""
        if torch.equal(self.x, x):
            return self.said
        same = (self.x == x).all(-1).tolist()
        return [said if here else None for said, here in zip(self.said, same, strict=True)]


Readings = dict[int, Reading]  # by column


class Probes:
    """One step's readings: column k for block k's input, the last column for the output's vector."""

    def __init__(
        self,
        head: Head,
        gates: Sequence[Gate],
        inputs: Callable[[Tensor, list[int]], Tensor],  # residual [n, D], columns -> [columns, n, D], nothing firing
        savings: Savings,
        most: int = ROWS,
        best: bool = False,  # of the output only the best token is wanted
    ):
        self.head, self.gates, self.inputs, self.savings, self.most = head, gates, inputs, savings, most
        self.last = len(gates)
        self.asked = [index for index, gate in enumerate(gates) if gate.needs] + [self.last]
        self.wants_margin = any("margin" in gate.needs for gate in gates)
        self.log_vocab = math.log(head.matrix.outputs)
        self.copied = savings.cheap and head.copy is not None
        self.best = best and self.copied and (head.copy_pays(head.fires, best=True) or not savings.joint)
        self.exact: Readings = {}
        self.cheap: Readings = {}
        self.doubts = 0

    def ask(self, index: int, h: Tensor, x: Tensor, position: Tensor) -> Evidence:
        """What gate `index` may know of its rows: h [R, D] the residual, x what the block reads of it."""
        if not self.gates[index].needs:
            return Evidence(x, position)
        said, _ = self._said(index, h, x, position.tolist())
        entropy, margin = torch.tensor([[s.entropy for s in said], [s.margin for s in said]], device=x.device)
        return Evidence(x, position, entropy, margin if self.wants_margin else None)

    def decide(self, index: int, h: Tensor, x: Tensor, position: Tensor) -> tuple[list[bool], list[float]]:
        """Which rows fire, and what the gate looked at."""
        gate = self.gates[index]
        if gate.needs == {"entropy"}:
            places = position.tolist()
            said, fires = self._said(index, h, x, places)
            fires = fires or self._between(gate, said, places)
            if fires is not None:
                return [bool(fire) for fire in fires], [s.entropy for s in said]
        verdict = gate(self.ask(index, h, x, position))
        return verdict.fire.tolist(), verdict.score.tolist()

    def foresees(self, first: int, rows: int) -> bool:
        """Whether blocks from `first` on are expected to fire with the one before, and one pass serves them and the output."""
        coming = self.last + 1 - first
        asked = self.asked[-coming:] == list(range(first, self.last + 1))
        return (
            self.savings.foresee
            and self.savings.joint
            and asked
            and 2 <= coming <= self.most // rows
            and self.head.again > SURELY
        )

    def foretell(self, first: int, vectors: Tensor) -> None:
        """Read the head for columns from `first` on, [columns, R, D], as they will be if the blocks before each fire."""
        rows = vectors.shape[1]
        readings = self.cheap if self.best else self.exact
        self._read(readings, list(range(first, self.last + 1)), list(range(rows)), rows, vectors)

    def output(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the output's vectors [R, D]: logits [R, V], or [R, 0] and the best token [R]; and entropy in nats [R]."""
        said = self._of(self.exact, self.last, hidden)
        if self.best and not all(said):
            return hidden[:, :0], *self._best(hidden, said)
        known = self._fill(self.exact, self.last, said, hidden)
        logits = self.exact[self.last].logits
        if logits is None:
            logits = torch.stack([s.logits for s in known if s.logits is not None])
        return logits, None, self._nats(known, hidden)

    def _best(self, hidden: Tensor, exact: list[Said | None]) -> tuple[Tensor, Tensor]:
        """The best token and the entropy of each row, over the 8-bit head where the exact one was not read anyway."""
        cheap = self._of(self.cheap, self.last, hidden)
        said = self._fill(self.cheap, self.last, [e or c for e, c in zip(exact, cheap, strict=True)], hidden)
        assert self.head.copy is not None
        tokens = []
        for row, (one, known) in enumerate(zip(said, exact, strict=True)):
            assert one.logits is not None
            if known is None:
                tokens.append(best(hidden[row : row + 1], self.head.matrix, self.head.copy, one.logits[None]))
            else:
                tokens.append(one.logits.argmax()[None])
        return torch.cat(tokens), self._nats(said, hidden)

    def _nats(self, said: Sequence[Said], like: Tensor) -> Tensor:
        return torch.tensor([s.entropy for s in said], device=like.device) * self.log_vocab

    def _said(self, index: int, h: Tensor, x: Tensor, position: list[int]) -> tuple[list[Said], list[bool | None] | None]:
        """What was said of each row, by which its gate can decide; and its decisions where they are known already."""
        gate = self.gates[index]
        if "gain" in gate.needs:
            raise AmorError("the oracle gate needs the true next tokens, which a decode step does not know; use another gate")
        exact = self._of(self.exact, index, x)
        bounded = gate.needs == {"entropy"} and type(gate).between is not Gate.between
        if not self.copied or not bounded or all(exact):
            return self._fill(self.exact, index, exact, x, h), None
        cheap = self._of(self.cheap, index, x)
        if not any(cheap) and not self._copy_pays():
            return self._fill(self.exact, index, exact, x, h), None
        said = self._fill(self.cheap, index, [e or c for e, c in zip(exact, cheap, strict=True)], x, h)
        for look in (self._refined, self._doubted):
            fires = self._between(gate, said, position)
            assert fires is not None
            unsure = [row for row, fire in enumerate(fires) if fire is None]
            if not unsure:
                return said, fires
            said = look(index, said, unsure, x, h)
        return said, None

    def _between(self, gate: Gate, said: Sequence[Said], position: Sequence[int]) -> list[bool | None] | None:
        """Which rows fire, as far as what was said of them decides it."""
        fires = gate.between([s.entropy - s.off for s in said], [s.entropy + s.off for s in said], position)
        if fires is None:
            return None
        return [fire if math.isfinite(s.off) else None for fire, s in zip(fires, said, strict=True)]

    def _copy_pays(self) -> bool:
        if self.best or not self.savings.joint:
            return True
        fired = self.exact or self.cheap  # what was read has changed since
        return self.head.copy_pays(self.head.again if fired else self.head.fires)

    def _refined(self, index: int, said: list[Said], rows: list[int], x: Tensor, h: Tensor) -> list[Said]:
        """The bound of some rows made narrower by the exact logits of their likeliest tokens."""
        assert self.head.copy is not None
        said = list(said)
        for row in rows:
            logits = said[row].logits
            assert logits is not None
            better = refine(x[row : row + 1], self.head.matrix, self.head.copy, logits[None])
            entropy, off = (better.told[:2, 0] / self.log_vocab).tolist()
            said[row] = Said(entropy, off, logits=logits)
        self.cheap[index] = Reading(x, list(said))
        return said

    def _doubted(self, index: int, said: list[Said], rows: list[int], x: Tensor, h: Tensor) -> list[Said]:
        """Some rows by the exact head."""
        self.doubts += len(rows)
        return self._fill(self.exact, index, [None if row in rows else s for row, s in enumerate(said)], x, h)

    def _of(self, readings: Readings, column: int, x: Tensor) -> list[Said | None]:
        return readings[column].of(x) if column in readings else [None] * len(x)

    def _fill(self, readings: Readings, column: int, said: list[Said | None], x: Tensor, h: Tensor | None = None) -> list[Said]:
        """What is known of rows x [R, D], the rest read now; with the residual h also columns to come, where one pass serves."""
        rows = [row for row, s in enumerate(said) if s is None]
        if rows:
            columns = [column]
            if h is not None and self.savings.joint:
                wanted = self.asked if readings is self.exact or self.best else self.asked[:-1]
                ahead = [c for c in wanted if c >= column]
                columns = ahead if len(rows) * len(ahead) <= self.most else columns
            whole = len(rows) == len(said)
            if len(columns) == 1:
                vectors = (x if whole else x[rows])[None]
            else:
                assert h is not None
                vectors = self.inputs(h if whole else h[rows], columns)
            self._read(readings, columns, rows, len(said), vectors)
            new = readings[column].said
            said = [new[row] if s is None else s for row, s in enumerate(said)]
        return said  # type: ignore[return-value]

    def _read(self, readings: Readings, columns: list[int], rows: list[int], of: int, vectors: Tensor) -> None:
        """Read a head for some columns of some rows `of` all; vectors [columns, rows, D]."""
        n, exact, flat = len(rows), readings is self.exact, vectors.flatten(0, 1)
        if exact:
            found = probe(flat, self.head.matrix, logits=columns[-1] == self.last, last=n)
        else:
            assert self.head.copy is not None
            found = probe(flat, self.head.copy, logits=True)
        self._count(exact, len(flat))
        told = found.told[:2] / self.log_vocab
        if self.wants_margin:
            told = torch.cat([told, found.margin[None]])
        numbers = told.tolist()
        if exact:  # even if its weights have 8 bits: then that is the head there is
            numbers[1] = [0.0] * len(flat)
        kept = 0 if found.logits is None else len(flat) - len(found.logits)  # the first vector whose logits are kept
        for i, column in enumerate(columns):
            held = readings.get(column)
            said: list[Said | None] = [None] * of if held is None else list(held.said)
            z = None if found.logits is None or i * n < kept else found.logits[i * n - kept : (i + 1) * n - kept]
            for j, row in enumerate(rows):
                entropy, off, *margin = (one[i * n + j] for one in numbers)
                said[row] = Said(entropy, off, margin[0] if margin else 0.0, None if z is None else z[j])
            if n == of:
                x = vectors[i]
            else:  # not a number is equal to nothing, so that no vector is taken for one that was read
                x = vectors.new_full((of, vectors.shape[2]), torch.nan) if held is None else held.x.clone()
                x[rows] = vectors[i]
            readings[column] = Reading(x, said, z if n == of else None)

    def _count(self, exact: bool, rows: int) -> None:
        passes, read = self.head.passes, -(-rows // ROWS)
        if exact:
            passes.exact, passes.rows = passes.exact + read, passes.rows + rows
        else:
            passes.cheap, passes.cheap_rows = passes.cheap + read, passes.cheap_rows + rows


class Stepping:
    """Probes as a strategy for the model's own forward: one token a row is read ahead, longer calls a block at a time."""

    def __init__(self, model: Amor, head: Head, plain: Separate, savings: Savings, most: int = ROWS):
        gates = [block.gate for block in model.each_block()]
        self.probes, self.plain, self.head = Probes(head, gates, inputs_of(model), savings, most), plain, head

    @torch.no_grad()
    def __call__(self, index: int, h: Tensor, x: Tensor, layout: Layout, needs: frozenset[str], opened: Residuals) -> Evidence:
        if x.shape[1] > 1 or layout.valid is not None:
            return self.plain(index, h, x, layout, needs, opened)
        seen = self.probes.ask(index, h[:, 0], x[:, 0], layout.positions[:, 0])
        entropy, margin = (None if t is None else t[:, None] for t in (seen.entropy, seen.margin))
        return Evidence(x, layout.positions, entropy, margin)


def inputs_of(model: Amor) -> Callable[[Tensor, list[int]], Tensor]:
    """What the head is asked of a residual if no more block fires: blocks' inputs, and in the last column the output's vector."""

    def inputs(h: Tensor, columns: list[int]) -> Tensor:
        last = h if model.final_norm is None else model.final_norm(h)
        return torch.stack([last if c == len(model.blocks) else model.block_input(c, h) for c in columns])

    return inputs
