"""The equivalence contract: however the same tokens are fed, a model says the same.

Every way of feeding, the decode engine's included, is compared with the plain forward: logits, gate scores and decisions,
final states. A decision may differ only where its score lies within the tolerance of the threshold. Such a tie ends the
comparison of its row, because what follows differs by right; ties are counted and shown, and so are the tokens compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amor.decode.engine import Engine
from amor.decode.policy import Fixed
from amor.errors import AmorError
from amor.gates.router import Router
from amor.judge.feeding import WAYS, Feeder, Seen, alone
from amor.judge.following import ENGINE_WAYS, engine_steps, engine_steps_only
from amor.judge.gates import Told
from amor.judge.standing import standing_for
from amor.kv import KV
from amor.mixers.mamba2 import Mamba2
from amor.models.amor import Amor
from amor.models.block import Block
from amor.ops.product.formats import FORMATS, format_of
from amor.parts import ShortConv
from amor.state import State

# relative to the largest number compared; a wrong mask or a lost window is off by more than 1e-2
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
MOST_LESSONS = 16  # samples shown to a gate that learns from measurements


@dataclass(frozen=True)
class Finding:
    """One way of feeding against the plain forward; differences are relative to the largest number compared."""

    way: str
    logits: float = float("nan")
    scores: float = float("nan")  # what the gates compared with their thresholds
    states: float = float("nan")  # recurrent states, windows, keys and values; nan where the way has no final state
    tokens: int = 0  # compared: of every row those before its first tie
    flips: int = 0  # gate decisions that differ although the score is clear of the threshold
    ties: int = 0  # rows in which a decision differs with the score at the threshold
    ok: bool = False
    left_out: str = ""  # why this way was not tried; that is no fault of the model, so it is ok


@torch.no_grad()
def stir(model: Amor, seed: int = 0) -> Amor:
    """Make an untrained model worth checking: every weight matters, no two are alike, gates fire now and then."""
    generator = torch.Generator().manual_seed(seed)
    # logits have a spread of about 2, and layers add more than the embedding holds: else every token would predict itself
    model.embed.weight.normal_(0, 2 * model.config.width**-0.5, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            spread = 2.0 if module is model.head else 1.0
            module.weight.normal_(0, spread * module.in_features**-0.5, generator=generator)
        elif isinstance(module, ShortConv):
            module.weight.normal_(0, 0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.2, generator=generator)
        elif isinstance(module, Block):
            module.alpha.normal_(0, 1, generator=generator)
        elif isinstance(module, Router):
            for t in module.network():
                t.normal_(0, t.shape[-1] ** -0.5, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm_f.weight", "_scale", ".D")):
            parameter.log_normal_(0, 0.3, generator=generator)
        elif name.endswith("q_proj.weight"):
            parameter.mul_(2)  # queries that prefer some keys to others
        elif name.startswith("backbone.") and name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.7)  # layers that do not enlarge each other's rounding
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            _stir_steps(module, generator)
    calibrate(model, torch.randint(0, model.config.vocab, (4, 96), generator=generator))
    return model


def _stir_steps(mixer: Any, generator: torch.Generator) -> None:
    """Steps of a recurrence from hardly any to beyond 20, where softplus is a straight line; memories short and long."""
    mixer.dt_bias.uniform_(-5, 3, generator=generator)
    mixer.dt_bias[::8] = 21
    step = F.softplus(mixer.dt_bias).view(len(mixer.A_log), -1).mean(1)  # of a head
    mixer.A_log.uniform_(-4, 1, generator=generator).sub_(step.log())
    if isinstance(mixer, Mamba2):  # takes in dt times what it reads, and no head may drown the others in the norm they share
        reads = mixer.conv1d.weight[: mixer.inner].view(len(step), -1)
        reads.div_(step.clamp(min=1)[:, None])


@torch.no_grad()
def calibrate(model: Amor, tokens: Tensor) -> None:
    """Give every gate that has met no data its statistics from these tokens, block after block."""
    targets = tokens.roll(-1, 1)  # only gates that know of gains look at them
    for _ in range(MOST_LESSONS):
        if all(block.gate.settled() for block in model.each_block()):
            break
        every = torch.arange(tokens.shape[1]).expand_as(tokens)
        model.learn(model(tokens, targets=targets, measure=every).measured)
    for index, block in enumerate(model.each_block()):
        if int(getattr(block.gate, "updates", torch.ones(()))) == 0:
            block.gate.observe(model(tokens, targets=targets).gates[index].score)


@torch.no_grad()
def check(model: Amor, length: int = 80, rows: int = 4, seed: int = 0, formats: Sequence[str] = tuple(FORMATS)) -> list[Finding]:
    """Every way of feeding against the plain forward, on random tokens; the decode engine's with weights of each format."""
    allowed = tolerance(model)
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab, (rows, length), generator=generator)
    lengths = [length, *torch.randint(3, length, (rows - 1,), generator=generator).tolist()]
    feeder = Feeder(model, tokens, lengths, seed)
    plain = alone(feeder)
    found = [compare(name, plain, way(feeder), model, allowed) for name, way in WAYS.items()]
    why = unheard(model)
    if why is not None:
        return found + [Finding(name, ok=True, left_out=why) for name in ENGINE_WAYS]
    engine, clear = Engine(model), [sure(seen, model, allowed) for seen in plain]
    found += [compare(name, plain, way(feeder, engine, clear), model, allowed) for name, way in ENGINE_WAYS.items()]
    if model.blocks:
        ahead = engine.behind(engine.gates, Fixed(True))
        found.append(compare("engine, blocks run ahead", plain, engine_steps(feeder, ahead, clear), model, allowed))
    return found + [rounded(feeder, engine, name) for name in formats if name != "float32"]


def tolerance(model: Amor) -> float:
    """How far apart two ways of feeding may lie. float64 has none: norms, recurrences and the head compute in float32."""
    dtype = model.embed.weight.dtype
    if dtype not in TOLERANCE:
        kind, known = str(dtype).removeprefix("torch."), " or ".join(str(t).removeprefix("torch.") for t in TOLERANCE)
        raise AmorError(f"check: the model's weights are {kind}, and states and norms are float32 at most; give {known} weights")
    return TOLERANCE[dtype]


def rounded(feeder: Feeder, engine: Engine, weights: str) -> Finding:
    """The engine with rounded weights against a model that computes by their definition; all gates open on both sides."""
    way, form, model = f"engine, {weights} weights", format_of(weights), feeder.model
    if engine.compiled is None or not engine.compiled.whole:
        return Finding(way, ok=True, left_out=f"rounded weights need compiled steps; this is {engine.path}")
    other = standing_for(model, weights)
    gates = [Told(True) for _ in model.each_block()]
    for block, gate in zip(other.each_block(), gates, strict=True):
        block.gate = gate
    theirs = Feeder(other, feeder.tokens, feeder.lengths, 0)
    mine = engine_steps_only(theirs, Engine(model, weights=weights, gates=gates))
    return compare(way, alone(theirs), mine, other, form.tolerance)


def unheard(model: Amor) -> str | None:
    """Why the decode engine cannot be asked, or None."""
    for block in model.each_block():
        if "gain" in block.gate.needs:
            return f"the gate {block.gate.kind!r} must be told the next token, which nobody knows while writing"
    return None


def sure(plain: Seen, model: Amor, allowed: float) -> int:
    """How many tokens of a row a prompt may have: up to the first whose decision is a toss-up, which is seen as its last."""
    near = torch.stack([n.any(0) for n in _near(plain, model, allowed)]).any(0) if model.blocks else torch.zeros(0)
    tosses = near.nonzero().flatten().tolist()
    return tosses[0] + 1 if tosses else plain.logits.shape[1]


def _near(seen: Seen, model: Amor, allowed: float) -> list[Tensor]:
    """A block: [1, T] where the score is so close to the threshold that rounding decides."""
    return [(s - block.gate.threshold).abs() <= allowed for s, block in zip(seen.scores, model.each_block(), strict=True)]


def compare(way: str, plain: list[Seen], found: list[Seen], model: Amor, allowed: float) -> Finding:
    """Row by row: everything up to the first tie, from which on the numbers differ by right."""
    logits = 0.0
    scores = states = float("nan")
    tokens = flips = ties = 0
    for a, b in zip(plain, found, strict=True):
        a = a.since(b.start)
        if any(x.shape != y.shape for x, y in zip([a.logits, *a.fires], [b.logits, *b.fires], strict=True)):
            return Finding(way, float("inf"), float("inf"), float("inf"))
        same, flipped, tied = decisions(a, b, _near(a, model, allowed))
        flips, ties, tokens = flips + flipped, ties + tied, tokens + same
        logits = max(logits, _apart(a.logits[:, :same], b.logits[:, :same]))
        for x, y in zip(a.scores, b.scores, strict=True):
            scores = _worse(scores, _apart(x[:, :same], y[:, :same]))
        if a.state is not None and b.state is not None:
            depth = len(model.backbone.layers)
            states = _worse(states, _states_apart(a.state, b.state, depth, b.start + same if tied else None))
    ok = flips == 0 and tokens > 0 and logits <= allowed and not scores > allowed and not states > allowed
    return Finding(way, logits, scores, states, tokens, flips, ties, ok)


def decisions(a: Seen, b: Seen, near: list[Tensor]) -> tuple[int, int, int]:
    """Tokens before the first tie; decisions up to it that differ although the score is clear; whether there is a tie.

    Decisions are met token by token and in a token block by block; one at the threshold may fall either way, and what
    comes after it differs by right.
    """
    columns = a.logits.shape[1]
    if not near:
        return columns, 0, 0
    differ = torch.cat([x != y for x, y in zip(a.fires, b.fires, strict=True)]).T.flatten()  # [T * K], in the order they are met
    tossed = torch.cat(near).T.flatten()
    tie = (differ & tossed).nonzero().flatten().tolist()[:1]
    met = differ[: tie[0]] if tie else differ
    return (tie[0] // len(near) if tie else columns), int(met.sum()), len(tie)


def _worse(known: float, gap: float) -> float:
    """The larger of what is known so far, nan for nothing, and one more difference."""
    return gap if known != known else max(known, gap)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    gap = ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
    return gap if gap == gap else float("inf")


def _states_apart(a: State, b: State, depth: int, tie: int | None) -> float:
    """The largest difference; keys and values of blocks, which come after `depth` layers, only up to a tie."""
    if not torch.equal(a.position, b.position):
        return float("inf")
    length, worst = int(a.position[0]), 0.0
    for index, (mine, theirs) in enumerate(zip(a.parts, b.parts, strict=True)):
        for name, held in mine.items():
            other = theirs[name]
            if isinstance(held, KV) and isinstance(other, KV):
                slots = length if tie is None or index < depth else tie
                pairs = [(held.k, other.k), (held.v, other.v)]
                worst = max(worst, *(_apart(x[:, :, :slots], y[:, :, :slots]) for x, y in pairs))
            elif isinstance(held, Tensor) and isinstance(other, Tensor):
                worst = max(worst, _apart(held, other))
    return worst
