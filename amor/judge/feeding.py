"""Ways of feeding the same tokens to a model's forward, which `amor check` compares."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from amor.models.amor import Amor
from amor.state import State


@dataclass(frozen=True)
class FeedOutput:
    """The output of a way of feeding, for the columns from `start` on."""

    logits: Tensor  # [B, T, V]
    scores: Tensor  # [B, K, T]
    fires: Tensor  # [B, K, T]
    state: State | None  # after the last token; None where a way has none per row
    start: int = 0

    def since(self, start: int) -> FeedOutput:
        """The same without its first columns."""
        rest = self.logits[:, start:], self.scores[..., start:], self.fires[..., start:]
        return FeedOutput(*rest, self.state, start)

    def row(self, index: int, columns: slice | Tensor) -> FeedOutput:
        """Some columns of one row."""
        logits, scores, fires = (t[index][None] for t in (self.logits, self.scores, self.fires))
        state = None if self.state is None else self.state.select([index])
        return FeedOutput(logits[:, columns], scores[..., columns], fires[..., columns], state)


def join(parts: Sequence[FeedOutput], start: int = 0) -> FeedOutput:
    """The outputs of consecutive columns as one, with the state of the last."""
    logits = torch.cat([part.logits for part in parts], 1)
    scores, fires = (
        torch.cat([getattr(part, name) for part in parts], 2) for name in ("scores", "fires")
    )
    return FeedOutput(logits, scores, fires, parts[-1].state, start)


class Feeder:
    """A model and tokens [B, T], lengths[b] of them in row b; `random` draws cuts and orders."""

    def __init__(self, model: Amor, tokens: Tensor, lengths: list[int], seed: int):
        self.model, self.tokens, self.lengths = model, tokens, lengths
        self.random = random.Random(seed)

    def rows(self) -> list[Tensor]:
        """Every row as [1, length]."""
        return [row[:n][None] for row, n in zip(self.tokens, self.lengths, strict=True)]

    def wrong(self, tokens: Tensor) -> Tensor:
        """Other tokens than these."""
        return (tokens + 1) % self.model.config.vocab

    def feed(self, tokens: Tensor, state: State | None = None, **more: Tensor) -> FeedOutput:
        """One call of the model's forward, with targets."""
        # only gates that use gains read targets; here they are a function of the token, so that any
        # cut gives the same
        targets = (tokens * 31 + 7) % self.model.config.vocab
        out = self.model(tokens, state, targets=targets, **more)
        none = out.hidden.new_zeros(len(tokens), 0, tokens.shape[1])  # without gates
        scores = torch.stack([gate.score for gate in out.gates], 1) if out.gates else none
        fires = torch.stack([gate.fire for gate in out.gates], 1) if out.gates else none
        return FeedOutput(self.model.logits(out.hidden), scores, fires, out.state)

    def replay(self, tokens: Tensor, state: State, lengths: Tensor) -> State:
        """What the model's own replay does after a rollback, with targets."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        after = self.feed(tokens, state, valid=columns < lengths[:, None]).state
        assert after is not None
        return after

    def in_pieces(self, row: Tensor, cuts: Iterable[int]) -> FeedOutput:
        """One row, cut at these places (0 and its end among them)."""
        parts: list[FeedOutput] = []
        for a, b in pairwise(cuts):
            parts.append(self.feed(row[:, a:b], parts[-1].state if parts else None))
        return join(parts)


def row_by_row(feeder: Feeder) -> list[FeedOutput]:
    """The plain forward of every row by itself: the reference for all other ways."""
    return [feeder.feed(row) for row in feeder.rows()]


def chunked(feeder: Feeder) -> list[FeedOutput]:
    """Every row by itself, cut at random places."""
    outputs = []
    for row in feeder.rows():
        cuts = sorted(feeder.random.sample(range(1, row.shape[1]), min(4, row.shape[1] - 1)))
        outputs.append(feeder.in_pieces(row, [0, *cuts, row.shape[1]]))
    return outputs


def token_by_token(feeder: Feeder) -> list[FeedOutput]:
    """Every row by itself, one token per call."""
    return [feeder.in_pieces(row, range(row.shape[1] + 1)) for row in feeder.rows()]


def _padded(feeder: Feeder, places: Callable[[int, int], Tensor]) -> list[FeedOutput]:
    """All rows in one batch, their tokens in the columns places(length, width), pads elsewhere."""
    width = max(feeder.lengths) + 3
    tokens = torch.full((len(feeder.lengths), width), feeder.model.config.vocab - 1)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    columns = [places(n, width) for n in feeder.lengths]
    for index, (row, where) in enumerate(zip(feeder.rows(), columns, strict=True)):
        tokens[index, where], valid[index, where] = row[0], True
    output = feeder.feed(tokens, valid=valid)
    return [output.row(index, where) for index, where in enumerate(columns)]


def left_padded(feeder: Feeder) -> list[FeedOutput]:
    """All rows in one batch, padded on the left."""
    return _padded(feeder, lambda n, width: torch.arange(width - n, width))


def right_padded(feeder: Feeder) -> list[FeedOutput]:
    """All rows in one batch, padded on the right."""
    return _padded(feeder, lambda n, width: torch.arange(n))


def scattered_pads(feeder: Feeder) -> list[FeedOutput]:
    """All rows in one batch, with padding between their tokens."""
    return _padded(
        feeder, lambda n, width: torch.tensor(sorted(feeder.random.sample(range(width), n)))
    )


def ragged_steps(feeder: Feeder) -> list[FeedOutput]:
    """All rows in one batch, each fed a random number of tokens per call, 0 included."""
    rows, done = feeder.rows(), [0] * len(feeder.lengths)
    parts: list[list[FeedOutput]] = [[] for _ in rows]
    state: State | None = feeder.model.start(len(rows))
    while done != feeder.lengths:
        left = [n - d for d, n in zip(done, feeder.lengths, strict=True)]
        takes = [min(feeder.random.randrange(0, 6), n) for n in left]
        if not any(takes):
            continue
        tokens = torch.zeros(len(rows), max(takes), dtype=torch.long)
        for index, take in enumerate(takes):
            tokens[index, :take] = rows[index][0, done[index] : done[index] + take]
        valid = torch.arange(max(takes)) < torch.tensor(takes)[:, None]
        output = feeder.feed(tokens, state, valid=valid)
        state = output.state
        for index, take in enumerate(takes):
            parts[index].append(output.row(index, slice(0, take)))
            done[index] += take
    return [join(each) for each in parts]


def packed(feeder: Feeder) -> list[FeedOutput]:
    """All rows as documents of one row, fed in two calls that cut a document."""
    stream = torch.cat(feeder.rows(), 1)
    starts = [sum(feeder.lengths[:i]) for i in range(len(feeder.lengths))]
    reset = torch.zeros_like(stream, dtype=torch.bool)
    reset[0, starts] = True
    cut = stream.shape[1] // 2 + 1
    first = feeder.feed(stream[:, :cut], reset=reset[:, :cut])
    whole = join([first, feeder.feed(stream[:, cut:], first.state, reset=reset[:, cut:])])
    outputs = [whole.row(0, slice(a, a + n)) for a, n in zip(starts, feeder.lengths, strict=True)]
    # the state is that of the last document
    return [replace(each, state=None) for each in outputs[:-1]] + outputs[-1:]


def through_disk(feeder: Feeder) -> list[FeedOutput]:
    """Every row by itself in two halves, the state saved and loaded between them."""
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        for row in feeder.rows():
            half, file = row.shape[1] // 2, Path(folder) / "state.safetensors"
            first = feeder.feed(row[:, :half])
            assert first.state is not None
            first.state.save(file)
            outputs.append(join([first, feeder.feed(row[:, half:], State.load(file))]))
    return outputs


def rolled_back(feeder: Feeder) -> list[FeedOutput]:
    """Feed a wrong continuation, roll it back with some right tokens, and feed those again."""
    outputs = []
    for row in feeder.rows():
        cut = row.shape[1] // 2
        first = feeder.feed(row[:, :cut], feeder.model.start(1).keep_history(16))
        wrong = feeder.wrong(row[:, cut : cut + 5])
        back, astray = min(cut - 1, 3), feeder.feed(wrong, first.state).state
        assert astray is not None
        state = astray.rollback(wrong.shape[1] + back, feeder.replay)
        again = feeder.feed(row[:, cut - back :], state)
        outputs.append(join([first.row(0, slice(0, cut - back)), again]))
    return outputs


def permuted(feeder: Feeder) -> list[FeedOutput]:
    """All rows in one batch in another order, padded on the right."""
    order = list(range(len(feeder.lengths)))
    feeder.random.shuffle(order)
    turned = Feeder(feeder.model, feeder.tokens[order], [feeder.lengths[i] for i in order], 0)
    outputs = right_padded(turned)
    return [outputs[order.index(index)] for index in range(len(order))]


def forked(feeder: Feeder) -> list[FeedOutput]:
    """Several continuations from one state: those before must not change the last."""
    outputs = []
    for row in feeder.rows():
        half = row.shape[1] // 2
        first = feeder.feed(row[:, :half])
        assert first.state is not None
        for start in (first.state.fork(), first.state):
            feeder.feed(feeder.wrong(row[:, half:]), start)
        outputs.append(join([first, feeder.feed(row[:, half:], first.state)]))
    return outputs


# name in the table of `amor check` -> the way
WAYS: dict[str, Callable[[Feeder], list[FeedOutput]]] = {
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
