"""Every way of feeding the same tokens to a model: what the equivalence contract compares."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from amor.models.amor import Amor, Output
from amor.state import State


class Feeder:
    """One model, a few rows of tokens of different lengths, and every way of feeding them."""

    def __init__(self, model: Amor, tokens: Tensor, lengths: list[int], seed: int):
        self.model, self.tokens, self.lengths = model, tokens, lengths
        self.random = random.Random(seed)

    def rows(self) -> list[Tensor]:
        return [row[:n][None] for row, n in zip(self.tokens, self.lengths, strict=True)]

    def feed(self, tokens: Tensor, state: State | None = None, **more: Tensor) -> Output:
        # only the oracle looks at targets; here they are a function of the token, so that any cut gives the same
        targets = (tokens * 31 + 7) % self.model.config.vocab
        return self.model(tokens, state, targets=targets, **more)

    def replay(self, tokens: Tensor, state: State, lengths: Tensor) -> State:
        """The model's own replay, with targets."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        return self.feed(tokens, state, valid=columns < lengths[:, None]).state

    def gather(self, outputs: list[Output]) -> Seen:
        """Consecutive calls of one batch, as one."""
        hidden = torch.cat([o.hidden for o in outputs], 1)
        scores = [torch.cat([o.gates[k].score for o in outputs], 1) for k in range(len(self.model.each_block()))]
        fires = [torch.cat([o.gates[k].fire for o in outputs], 1) for k in range(len(self.model.each_block()))]
        return Seen(self.model.logits(hidden), scores, fires, outputs[-1].state)


@dataclass(frozen=True)
class Seen:
    logits: Tensor  # [B, T, V]
    scores: list[Tensor]  # one a block
    fires: list[Tensor]
    state: State | None
    start: int = 0  # the column of the first token something is known of

    def since(self, start: int) -> Seen:
        """The same without its first columns."""
        cut = [[t[:, start:] for t in each] for each in ([self.logits], self.scores, self.fires)]
        return Seen(cut[0][0], cut[1], cut[2], self.state, start)

    def row(self, index: int, columns: slice | Tensor) -> Seen:
        return Seen(
            self.logits[index : index + 1, columns],
            [s[index : index + 1, columns] for s in self.scores],
            [f[index : index + 1, columns] for f in self.fires],
            None if self.state is None else self.state.select([index]),
        )


def alone(feeder: Feeder) -> list[Seen]:
    """The plain forward of every row by itself: what all other ways must equal."""
    return [feeder.gather([feeder.feed(row)]) for row in feeder.rows()]


def chunked(feeder: Feeder) -> list[Seen]:
    found = []
    for row in feeder.rows():
        cuts = sorted(feeder.random.sample(range(1, row.shape[1]), min(4, row.shape[1] - 1)))
        found.append(feeder.gather(_in_pieces(feeder, row, [0, *cuts, row.shape[1]])))
    return found


def token_by_token(feeder: Feeder) -> list[Seen]:
    return [feeder.gather(_in_pieces(feeder, row, list(range(row.shape[1] + 1)))) for row in feeder.rows()]


def _in_pieces(feeder: Feeder, row: Tensor, cuts: list[int], state: State | None = None) -> list[Output]:
    outputs = []
    for a, b in pairwise(cuts):
        outputs.append(feeder.feed(row[:, a:b], state))
        state = outputs[-1].state
    return outputs


def _padded(feeder: Feeder, places: Callable[[int, int], Tensor]) -> list[Seen]:
    """All rows in one batch, each row's tokens in the columns `places(length, width)`; pads hold a junk token."""
    width = max(feeder.lengths) + 3
    tokens = torch.full((len(feeder.lengths), width), feeder.model.config.vocab - 1)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    columns = [places(n, width) for n in feeder.lengths]
    for index, (row, where) in enumerate(zip(feeder.rows(), columns, strict=True)):
        tokens[index, where], valid[index, where] = row[0], True
    seen = feeder.gather([feeder.feed(tokens, valid=valid)])
    return [seen.row(index, where) for index, where in enumerate(columns)]


def left_padded(feeder: Feeder) -> list[Seen]:
    return _padded(feeder, lambda n, width: torch.arange(width - n, width))


def right_padded(feeder: Feeder) -> list[Seen]:
    return _padded(feeder, lambda n, width: torch.arange(n))


def scattered_pads(feeder: Feeder) -> list[Seen]:
    return _padded(feeder, lambda n, width: torch.tensor(sorted(feeder.random.sample(range(width), n))))


def ragged_steps(feeder: Feeder) -> list[Seen]:
    """Rows of different lengths read on together, each a different number of tokens a call, some none at all."""
    rows, model = feeder.rows(), feeder.model
    done, state = [0] * len(rows), model.start(len(rows))
    pieces: list[list[Seen]] = [[] for _ in rows]
    while any(d < n for d, n in zip(done, feeder.lengths, strict=True)):
        takes = [min(feeder.random.randrange(0, 6), n - d) for d, n in zip(done, feeder.lengths, strict=True)]
        if not any(takes):
            continue
        tokens = torch.zeros(len(rows), max(takes), dtype=torch.long)
        for index, take in enumerate(takes):
            tokens[index, :take] = rows[index][0, done[index] : done[index] + take]
        valid = torch.arange(max(takes)) < torch.tensor(takes)[:, None]
        output = feeder.feed(tokens, state, valid=valid)
        state, seen = output.state, feeder.gather([output])
        for index, take in enumerate(takes):
            pieces[index].append(seen.row(index, slice(0, take)))
            done[index] += take
    return [_joined(parts, state.select([index])) for index, parts in enumerate(pieces)]


def _joined(parts: list[Seen], state: State | None) -> Seen:
    blocks = range(len(parts[0].scores))
    return Seen(
        torch.cat([p.logits for p in parts], 1),
        [torch.cat([p.scores[k] for p in parts], 1) for k in blocks],
        [torch.cat([p.fires[k] for p in parts], 1) for k in blocks],
        state,
    )


def packed(feeder: Feeder) -> list[Seen]:
    """All rows one after the other in a single row, cut in two calls in the middle of a document."""
    stream = torch.cat(feeder.rows(), 1)
    starts = [sum(feeder.lengths[:i]) for i in range(len(feeder.lengths))]
    reset = torch.zeros_like(stream, dtype=torch.bool)
    reset[0, starts] = True
    cut = stream.shape[1] // 2 + 1
    first = feeder.feed(stream[:, :cut], reset=reset[:, :cut])
    second = feeder.feed(stream[:, cut:], first.state, reset=reset[:, cut:])
    seen = feeder.gather([first, second])
    found = [seen.row(0, slice(a, a + n)) for a, n in zip(starts, feeder.lengths, strict=True)]
    return [Seen(f.logits, f.scores, f.fires, f.state if i == len(found) - 1 else None) for i, f in enumerate(found)]


def through_disk(feeder: Feeder) -> list[Seen]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in feeder.rows():
            half = row.shape[1] // 2
            first = feeder.feed(row[:, :half])
            first.state.save(Path(folder) / "state.safetensors")
            second = feeder.feed(row[:, half:], State.load(Path(folder) / "state.safetensors"))
            found.append(feeder.gather([first, second]))
    return found


def rolled_back(feeder: Feeder) -> list[Seen]:
    """Read a wrong continuation, take it back together with some right tokens, and read those again."""
    found = []
    for row in feeder.rows():
        cut = row.shape[1] // 2
        first = feeder.feed(row[:, :cut], feeder.model.start(1).keep_history(16))
        wrong = (row[:, cut : cut + 5] + 1) % feeder.model.config.vocab
        back = min(cut - 1, 3)
        state = feeder.feed(wrong, first.state).state.rollback(wrong.shape[1] + back, feeder.replay)
        again = feeder.feed(row[:, cut - back :], state)
        whole = feeder.gather([first]).row(0, slice(0, cut - back))
        found.append(_joined([whole, feeder.gather([again])], again.state))
    return found


def permuted(feeder: Feeder) -> list[Seen]:
    order = list(range(len(feeder.lengths)))
    feeder.random.shuffle(order)
    turned = Feeder(feeder.model, feeder.tokens[order], [feeder.lengths[i] for i in order], 0)
    found = right_padded(turned)
    return [found[order.index(index)] for index in range(len(order))]


def forked(feeder: Feeder) -> list[Seen]:
    """Two continuations from one state: the first must leave no trace in the second."""
    found = []
    for row in feeder.rows():
        half = row.shape[1] // 2
        first = feeder.feed(row[:, :half])
        for start in (first.state.fork(), first.state):
            feeder.feed((row[:, half:] + 1) % feeder.model.config.vocab, start)
        found.append(feeder.gather([first, feeder.feed(row[:, half:], first.state)]))
    return found


WAYS: dict[str, Callable[[Feeder], list[Seen]]] = {
    "chunked at random cuts": chunked,
    "token by token": token_by_token,
    "left-padded": left_padded,
    "right-padded": right_padded,
    "pads anywhere": scattered_pads,
    "ragged batch": ragged_steps,
    "packed documents": packed,
    "state through disk": through_disk,
    "rollback and redo": rolled_back,
    "permuted batch": permuted,
    "forked state": forked,
}
