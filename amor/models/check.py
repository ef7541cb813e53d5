"""The equivalence contract: however the same tokens are fed, a model says the same.

Every way of feeding is compared with the plain forward, for logits, gate decisions and final states. A decision may
differ only where its score lies within the tolerance of the threshold: those ties are counted and shown.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from amor.models.amor import Amor, Output
from amor.models.block import Block
from amor.parts import ShortConv
from amor.state import KV, State

# relative to the largest number compared; a wrong mask or a lost window is off by more than 1e-2
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Finding:
    """One way of feeding against the plain forward."""

    way: str
    logits: float  # largest difference, relative to the largest logit
    states: float  # the same for recurrent states, windows, keys and values; nan where the way has no final state
    flips: int  # gate decisions that differ although the score is clear of the threshold
    ties: int  # gate decisions that differ with the score at the threshold
    ok: bool


@torch.no_grad()
def stir(model: Amor, seed: int = 0) -> Amor:
    """Make an untrained model worth checking: weights that matter everywhere, blocks that speak, gates that fire."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, module.in_features**-0.5, generator=generator)
        elif isinstance(module, ShortConv):
            module.weight.normal_(0, 0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.2, generator=generator)
        elif isinstance(module, Block):
            module.alpha.normal_(0, 1, generator=generator)
    model.embed.weight.normal_(0, 1, generator=generator)
    # a head that is sure of some tokens and unsure of others
    model.norm_f.weight.mul_(0.1)
    if model.final_norm is not None:
        model.final_norm.weight.mul_(0.1)
    for block in model.blocks:
        if block.norm is not None:
            block.norm.weight.mul_(0.1)
    calibrate(model, torch.randint(0, model.config.vocab, (4, 96), generator=generator))
    return model


@torch.no_grad()
def calibrate(model: Amor, tokens: Tensor) -> None:
    """Give every gate that has met no data its statistics from these tokens, block after block."""
    targets = tokens.roll(-1, 1)  # only the oracle looks at them
    for index, block in enumerate(model.blocks):
        if int(getattr(block.gate, "updates", torch.ones(()))) == 0:
            block.gate.observe(model(tokens, targets=targets).gates[index].score)



class Feeder:
    """One model, a few rows of tokens of different lengths, and every way of feeding them."""

    def __init__(self, model: Amor, tokens: Tensor, lengths: list[int], seed: int):
        self.model, self.tokens, self.lengths = model, tokens, lengths
        self.random = random.Random(seed)

    def rows(self) -> list[Tensor]:
        return [row[:n][None] for row, n in zip(self.tokens, self.lengths, strict=True)]

    def feed(self, tokens: Tensor, state: State | None = None, **more: Tensor) -> Output:
        targets = tokens.roll(-1, 1) if self.model.config.blocks.gate == "oracle" else None
        return self.model(tokens, state, targets=targets, **more)

    def gather(self, outputs: list[Output]) -> Seen:
        """Consecutive calls of one batch, as one."""
        hidden = torch.cat([o.hidden for o in outputs], 1)
        scores = [torch.cat([o.gates[k].score for o in outputs], 1) for k in range(len(self.model.blocks))]
        fires = [torch.cat([o.gates[k].fire for o in outputs], 1) for k in range(len(self.model.blocks))]
        return Seen(self.model.logits(hidden), scores, fires, outputs[-1].state)


@dataclass(frozen=True)
class Seen:
    logits: Tensor  # [B, T, V]
    scores: list[Tensor]  # one a block
    fires: list[Tensor]
    state: State | None

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
    for a, b in zip(cuts, cuts[1:], strict=False):
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
        first = feeder.feed(row[:, :cut], feeder.model.start(1).remember(16))
        wrong = (row[:, cut : cut + 5] + 1) % feeder.model.config.vocab
        back = min(cut - 1, 3)
        state = feeder.feed(wrong, first.state).state.rollback(wrong.shape[1] + back, feeder.model.replay)
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


@torch.no_grad()
def check(model: Amor, length: int = 80, rows: int = 4, seed: int = 0) -> list[Finding]:
    """Every way of feeding against the plain forward, on random tokens."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab, (rows, length), generator=generator)
    lengths = [length, *torch.randint(3, length, (rows - 1,), generator=generator).tolist()]
    feeder = Feeder(model, tokens, lengths, seed)
    plain = alone(feeder)
    ways = {name: way for name, way in WAYS.items() if not _needs_the_next_token(model, name)}
    return [_compare(name, plain, way(feeder), model) for name, way in ways.items()]


def _needs_the_next_token(model: Amor, way: str) -> bool:
    """The oracle is told the next token, which only a whole row in one call can do."""
    return model.config.blocks.gate == "oracle" and way not in ("left-padded", "right-padded", "permuted batch")


def _compare(way: str, plain: list[Seen], found: list[Seen], model: Amor) -> Finding:
    tolerance = TOLERANCE[model.embed.weight.dtype]
    logits = max(_apart(a.logits, b.logits) for a, b in zip(plain, found, strict=True))
    states = [_states_apart(a.state, b.state) for a, b in zip(plain, found, strict=True) if a.state and b.state]
    flips = ties = 0
    for a, b in zip(plain, found, strict=True):
        for k, block in enumerate(model.blocks):
            differ = a.fires[k] != b.fires[k]
            near = (a.scores[k] - block.gate.threshold).abs() <= tolerance
            ties += int((differ & near).sum())
            flips += int((differ & ~near).sum())
    worst = max(states) if states else float("nan")
    # a decision at the threshold may fall either way, and then the numbers after it differ by right
    ok = flips == 0 and (ties > 0 or (logits <= tolerance and not worst > tolerance))
    return Finding(way, logits, worst, flips, ties, ok)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    gap = ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
    return gap if gap == gap else float("inf")


def _states_apart(a: State, b: State) -> float:
    if not torch.equal(a.position, b.position):
        return float("inf")
    length, worst = int(a.position[0]), 0.0
    for mine, theirs in zip(a.parts, b.parts, strict=True):
        for name, held in mine.items():
            other = theirs[name]
            if isinstance(held, KV) and isinstance(other, KV):
                pairs = [(held.k, other.k), (held.v, other.v)]
                worst = max(worst, *(_apart(x[:, :, :length], y[:, :, :length]) for x, y in pairs))
            elif isinstance(held, Tensor) and isinstance(other, Tensor):
                worst = max(worst, _apart(held, other))
    return worst
