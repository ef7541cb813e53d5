"""Log-likelihoods of continuations: each context is read once, its state forked for its continuations, and the head is asked for
target rows only.

A score depends on its request alone, to the bit: neither on how many are read at a time, nor on which, nor on their order. So a
row is padded to a width that follows from its own length (of another width its chunks would be others, and round otherwise),
and products are those whose rows do not know each other.
Two ways (`records.evals.Path`): `likelihood` reads whole stretches by the model's forward; `decode` steps through the
continuation token by token in the engine, where a closed gate really skips its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from amor.decode.engine import Engine, Session
from amor.decode.known import Next
from amor.gates.base import Gate
from amor.judge.gates import own_gates
from amor.models.amor import Amor, Output
from amor.ops import head
from amor.ops.chunks import LARGEST, MULTIPLE
from amor.ops.linear import each_alone
from amor.records.evals import Counts, Phases
from amor.state import State

PIECE = 4096  # columns of a long context read at a time
TOKENS = 8192  # of one call, at the most, unless a row is longer
UNIT = 2.0**32  # scores are summed as whole numbers of this many parts
NO_MARGIN = 1e9  # of a gate that compares nothing
ROWS = 32  # contexts read at a time


@dataclass(frozen=True)
class Request:
    context: tuple[int, ...]  # at least one token
    target: tuple[int, ...]  # at least one token


@dataclass(frozen=True)
class Scored:
    logprob: float  # of the target, in nats
    greedy: bool  # whether every token of it is the likeliest
    phases: Phases


@dataclass
class Tally:
    """What gates did, to be summed."""

    tokens: int = 0
    fires: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)

    def include(self, other: Counts) -> None:
        if not self.tokens:
            self.tokens, self.fires = other.tokens, list(other.fires)
            self.score, self.margin = list(other.score), list(other.margin)
        elif other.tokens:
            self.tokens += other.tokens
            self.fires = [a + b for a, b in zip(self.fires, other.fires, strict=True)]
            self.score = [a + b for a, b in zip(self.score, other.score, strict=True)]
            self.margin = [min(a, b) for a, b in zip(self.margin, other.margin, strict=True)]

    def counts(self) -> Counts:
        return Counts(tokens=self.tokens, fires=tuple(self.fires), score=tuple(self.score), margin=tuple(self.margin))


def counts(fire: Tensor, score: Tensor, here: Tensor, thresholds: Sequence[float]) -> list[Counts]:
    """What gates did at the marks `here` [B, T], a row each; fire and score [K, B, T]. Sums do not depend on their order."""
    tokens = here.sum(1).tolist()
    if not len(fire):
        return [Counts(tokens=0) for _ in tokens]
    level = torch.tensor(thresholds, dtype=torch.float64)[:, None, None]
    exact = (score.double() * UNIT).round().long().masked_fill(~here, 0).sum(2) / UNIT
    away = (score.double() - level).abs().nan_to_num(NO_MARGIN).masked_fill(~here, NO_MARGIN).amin(2)
    each = zip(tokens, *((t.T.tolist()) for t in ((fire & here).sum(2), exact, away)), strict=True)
    return [Counts(tokens=n, fires=tuple(f), score=tuple(e), margin=tuple(m)) if n else Counts(tokens=0) for n, f, e, m in each]


@dataclass(frozen=True)
class Read:
    """Contexts after their last token: hidden [n, D], fire and score [K, n] there, the state; what gates did there and before."""

    hidden: Tensor
    fire: Tensor
    score: Tensor
    state: State
    last: list[Counts]
    before: list[Counts]


@dataclass(frozen=True)
class Piece:
    """Some columns of rows that are read: here [B, T] where there are tokens."""

    start: int
    here: Tensor
    out: Output

    @cached_property
    def fire(self) -> Tensor:
        """[K, B, T]"""
        return self._stacked("fire", torch.bool)

    @cached_property
    def score(self) -> Tensor:
        return self._stacked("score", torch.float32)

    def _stacked(self, name: str, dtype: torch.dtype) -> Tensor:
        each = [getattr(gate, name).cpu() for gate in self.out.gates]
        return torch.stack(each) if each else torch.zeros(0, *self.here.shape, dtype=dtype)


Member = tuple[int, int, tuple[int, ...]]  # of a batch: the row of its context, its place among the requests, its target


class Scorer:
    def __init__(
        self,
        model: Amor,
        *,
        gates: Sequence[Gate] | None = None,  # one a block, instead of the model's own
        rows: int = ROWS,
        engine: Engine | None = None,  # given: the decode path
        fed: Callable[[int], None] = lambda tokens: None,  # told how many tokens were fed
    ):
        self.model, self.rows, self.fed = model.eval(), rows, fed
        self.gates = own_gates(model) if gates is None else list(gates)
        self.engine = None if engine is None else engine.behind(self.gates)
        self.thresholds = [float(gate.threshold) for gate in self.gates]

    @torch.no_grad()
    def score(self, requests: Sequence[Request]) -> Iterator[tuple[int, Scored]]:
        """Every request once, with its place; the longest contexts first, so that the time that is left is told early."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for place, request in enumerate(requests):
            by_context.setdefault(request.context, []).append(place)
        contexts = sorted(by_context, key=lambda c: (-len(c), c))
        for batch in batches(contexts, self.rows):
            members = [(row, place, requests[place].target) for row, c in enumerate(batch) for place in by_context[c]]
            with each_alone():
                read = self.read(batch)
                found = (self._by_forward if self.engine is None else self._by_steps)(read, members)
            yield from found.items()

    def read(self, contexts: Sequence[tuple[int, ...]]) -> Read:
        """Contexts from the beginning, longest first."""
        lengths, before = torch.tensor([len(c) for c in contexts]), [Tally() for _ in contexts]
        ends: list[tuple[Tensor, Tensor, Tensor]] = [()] * len(contexts)  # type: ignore[list-item]
        state = None
        for piece in self._pieces(contexts, None):
            state, column = piece.out.state, piece.start + torch.arange(piece.here.shape[1])
            for tally, found in zip(before, self._counts(piece, piece.here & (column < lengths[:, None] - 1)), strict=True):
                tally.include(found)
            for row in ((lengths > piece.start) & (lengths <= piece.start + piece.here.shape[1])).nonzero()[:, 0].tolist():
                at = int(lengths[row]) - 1 - piece.start
                ends[row] = piece.out.hidden[row, at], piece.fire[:, row, at], piece.score[:, row, at]
        hidden, fire, score = (torch.stack(each) for each in zip(*ends, strict=True))
        assert state is not None
        there = torch.ones(len(contexts), 1, dtype=torch.bool)
        last = counts(fire.T[..., None], score.T[..., None], there, self.thresholds)
        return Read(hidden, fire.T, score.T, state, last, [tally.counts() for tally in before])

    def session(self, read: Read, room: int = 0) -> Session:
        """What was read, ready to be written on by the engine; room: for so many tokens."""
        assert self.engine is not None
        none = torch.empty(len(read.hidden), 0, dtype=torch.long)
        state = read.state.reserve(read.state.max_position + room)
        return Session(self.engine, state, Next(read.fire.T, read.score.T, self.engine._logits(read.hidden), none))

    def _by_forward(self, read: Read, members: list[Member]) -> dict[int, Scored]:
        # the first token of a target is said by the last token of its context
        first = self._said(read.hidden[[row for row, *_ in members]], [target[0] for *_, target in members])
        said = {place: [one] for (_, place, _), one in zip(members, first, strict=True)}
        tallies = {place: Tally() for _, place, _ in members}
        for row, place, _ in members:
            tallies[place].include(read.last[row])
        rest = sorted((m for m in members if len(m[2]) > 1), key=lambda m: (-len(m[2]), m[1]))
        for some in batches([target[:-1] for *_, target in rest], 4 * self.rows):
            chosen, rest = rest[: len(some)], rest[len(some) :]
            for piece in self._pieces(some, read.state.select([row for row, *_ in chosen])):
                parts = [target[piece.start + 1 : piece.start + 1 + PIECE] for *_, target in chosen]
                told = iter(self._said(piece.out.hidden[piece.here], [token for part in parts for token in part]))
                for (_, place, _), part, found in zip(chosen, parts, self._counts(piece, piece.here), strict=True):
                    said[place] += [next(told) for _ in part]
                    tallies[place].include(found)
        return {
            place: self._scored(said[place], {"prefill": read.before[row], "target": tallies[place].counts()})
            for row, place, _ in members
        }

    def _by_steps(self, read: Read, members: list[Member]) -> dict[int, Scored]:
        """Rows of all contexts go on together; a row leaves with its last token."""
        members = sorted(members, key=lambda m: (-len(m[2]), m[1]))
        session = self.session(read).select([row for row, *_ in members])
        said: dict[int, list[tuple[float, bool]]] = {place: [] for _, place, _ in members}
        tallies = {place: Tally() for _, place, _ in members}
        for at in range(len(members[0][2])):
            going = [m for m in members if len(m[2]) > at]
            if len(going) < session.rows:
                session = session.select(range(len(going)))
            if at:
                session.step([target[at - 1] for *_, target in going])
                self.fed(len(going))
            now = session.next
            logprobs, best = now.logits.double().log_softmax(-1), now.best.tolist()
            there = torch.ones(len(going), 1, dtype=torch.bool)
            found = counts(now.fire.T[..., None], now.score.T[..., None], there, self.thresholds)
            for index, (_, place, target) in enumerate(going):
                said[place].append((float(logprobs[index, target[at]]), best[index] == target[at]))
                tallies[place].include(found[index])
        return {
            place: self._scored(said[place], {"prefill": read.before[row], "decode": tallies[place].counts()})
            for row, place, _ in members
        }

    def _scored(self, said: list[tuple[float, bool]], phases: Phases) -> Scored:
        return Scored(sum(logprob for logprob, _ in said), all(best for _, best in said), phases if self.gates else {})

    def _pieces(self, rows: Sequence[tuple[int, ...]], state: State | None) -> Iterator[Piece]:
        """Rows read on from a state, longest first and padded on the right. Neither state nor gate sees padding."""
        device = self.model.embed.weight.device
        for start in range(0, len(rows[0]), PIECE):
            some = [row[start : start + PIECE] for row in rows]
            # after the first piece rows of all lengths stand beside each other: of a width at which all chunks are whole
            columns = max(width_of(len(some[0])), LARGEST if start else 0)
            tokens = torch.tensor([[*row, *[0] * (columns - len(row))] for row in some], device=device)
            here = torch.arange(columns) < torch.tensor([len(row) for row in some])[:, None]
            out = self.model(tokens, state, valid=here.to(device), gates=self.gates, compute="true_sparse")
            state = out.state
            self.fed(sum(map(len, some)))
            yield Piece(start, here, out)

    def _counts(self, piece: Piece, here: Tensor) -> list[Counts]:
        return counts(piece.fire, piece.score, here, self.thresholds)

    def _said(self, hidden: Tensor, targets: Sequence[int]) -> list[tuple[float, bool]]:
        """For hidden vectors [n, D] and the tokens that come: log-likelihoods, and whether each is the likeliest."""
        wanted = torch.tensor(list(targets), device=hidden.device)
        read = head.read(hidden, self.model.head_weight, wanted, topk=1)
        assert read.nll is not None and read.topk is not None
        best = read.topk[1][:, 0] == wanted
        return [(-nll, hit) for nll, hit in zip(read.nll.tolist(), best.tolist(), strict=True)]


def alone(forward: Callable[..., Output]) -> Callable[..., Output]:
    """A forward, or what stands for it, whose rows do not know each other."""

    def call(*given: Any, **more: Any) -> Output:
        with each_alone():
            return forward(*given, **more)

    return call


def width_of(length: int) -> int:
    """The columns of a row: a multiple of what chunks are a multiple of, so that its chunks follow from its own length."""
    return -(-length // MULTIPLE) * MULTIPLE


def batches(rows: Sequence[tuple[int, ...]], most: int) -> Iterator[list[tuple[int, ...]]]:
    """Rows, longest first, in calls: not too many tokens, and short rows only beside those of the same width."""
    start = 0
    while start < len(rows):
        width = width_of(len(rows[start]))
        end = start + 1
        while end < len(rows) and end - start < most and (end + 1 - start) * width <= max(TOKENS, width):
            other = width_of(len(rows[end]))
            if other != width and other <= LARGEST:
                break
            end += 1
        yield list(rows[start:end])
        start = end
