"""The equivalence contract: however the same tokens are fed, a model gives the same outputs.

Every way of feeding, the decode engine's included, is compared with the plain forward: logits, gate
scores and decisions, final states. A decision may differ only where its score lies within the
tolerance of the threshold. Such a tie ends the comparison of its row, because what follows may
differ legitimately; ties and the tokens compared are counted and shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.decode.engine import Engine
from amor.decode.policy import Fixed
from amor.errors import AmorError
from amor.judge.dequantised import dequantised_reference
from amor.judge.engine_feeding import (
    ENGINE_WAYS,
    engine_drafts,
    engine_rows,
    engine_steps_only,
)
from amor.judge.feeding import WAYS, Feeder, FeedOutput, row_by_row
from amor.judge.gates import force_all
from amor.kv import KV
from amor.models.amor import Amor
from amor.ops.product.formats import FORMATS, format_of
from amor.state import State

# relative to the largest number compared; a wrong mask or a lost window is off by more than 1e-2
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Finding:
    """One way of feeding against the plain forward; differences relative to the largest number."""

    way: str  # of feeding
    logits: float = float("nan")  # largest relative difference, as in the next two
    scores: float = float("nan")  # what the gates compared with their thresholds
    # recurrent states, windows, keys and values; nan where the way has no final state
    states: float = float("nan")
    tokens: int = 0  # compared: of every row those before its first tie
    flips: int = 0  # gate decisions that differ although the score is clear of the threshold
    ties: int = 0  # rows in which a decision differs with the score at the threshold
    ok: bool = False
    left_out: str = ""  # why this way was not tried; that is no fault of the model, so it is ok


@torch.no_grad()
def check(
    model: Amor,
    length: int = 80,  # tokens of the longest row: several chunks of a scan and a partial one
    rows: int = 4,
    seed: int = 0,
    # of weights, with which the engine's steps are compared too
    formats: Sequence[str] = tuple(FORMATS),
) -> list[Finding]:
    """Compare every way of feeding random tokens with the plain forward, one Finding per way."""
    allowed = tolerance(model)
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab, (rows, length), generator=generator)
    lengths = [length, *torch.randint(3, length, (rows - 1,), generator=generator).tolist()]
    feeder = Feeder(model, tokens, lengths, seed)
    plain = row_by_row(feeder)
    findings = [compare(name, plain, way(feeder), model, allowed) for name, way in WAYS.items()]
    why = why_no_engine(model)
    if why is not None:
        return findings + [Finding(name, ok=True, left_out=why) for name in ENGINE_WAYS]
    engine, clear = Engine(model), [clear_prefix(output, model, allowed) for output in plain]
    for name, way in ENGINE_WAYS.items():
        if way is engine_drafts and not engine.own_memory:
            why = f"drafts need compiled steps; this is {engine.path}"
            findings.append(Finding(name, ok=True, left_out=why))
        else:
            findings.append(compare(name, plain, way(feeder, engine, clear), model, allowed))
    if model.blocks:
        ahead = engine_rows(feeder, engine.behind(engine.gates, Fixed(True)), clear)
        findings.append(compare("engine, blocks run ahead", plain, ahead, model, allowed))
    return findings + [check_rounded(feeder, engine, name) for name in formats if name != "float32"]


def tolerance(model: Amor) -> float:
    """How far apart two ways of feeding may lie. float64 has none: norms, recurrences and the head
    compute in float32."""
    dtype = model.embed.weight.dtype
    if dtype not in TOLERANCE:
        kind, *known = (str(each).removeprefix("torch.") for each in (dtype, *TOLERANCE))
        limits = f"the model's weights are {kind}, and states and norms are float32 at most"
        raise AmorError(f"check: {limits}; give {' or '.join(known)} weights")
    return TOLERANCE[dtype]


def check_rounded(feeder: Feeder, engine: Engine, weights: str) -> Finding:
    """The engine with rounded weights against the definition of their format, all gates open."""
    way, form, model = f"engine, {weights} weights", format_of(weights), feeder.model
    if engine.compiled is None or not engine.compiled.whole:
        why = f"rounded weights need compiled steps; this is {engine.path}"
        return Finding(way, ok=True, left_out=why)
    other = dequantised_reference(model, weights)
    gates = force_all(model, True)
    for block, gate in zip(other.each_block(), gates, strict=True):
        block.gate = gate
    theirs = Feeder(other, feeder.tokens, feeder.lengths, 0)
    mine = engine_steps_only(theirs, Engine(model, weights=weights, gates=gates))
    return compare(way, row_by_row(theirs), mine, other, form.tolerance)


def why_no_engine(model: Amor) -> str | None:
    """Why the decode engine cannot run this model, or None where it can."""
    for block in model.each_block():
        if "gain" in block.gate.needs:
            lack = "needs the next token, which is not known while text is generated"
            return f"the gate {block.gate.kind!r} {lack}"
    return None


def clear_prefix(plain: FeedOutput, model: Amor, allowed: float) -> int:
    """The longest prompt of a row: up to its first decision at the threshold, which is observed."""
    columns = _near(plain, model, allowed)[0].any(0).nonzero().flatten().tolist()
    return columns[0] + 1 if columns else plain.logits.shape[1]


def _near(output: FeedOutput, model: Amor, allowed: float) -> Tensor:
    """[1, K, T] True where the score is so close to the threshold that rounding decides."""
    thresholds = torch.tensor([float(block.gate.threshold) for block in model.each_block()])
    return (output.scores - thresholds[:, None]).abs() <= allowed


def compare(
    way: str, plain: list[FeedOutput], other: list[FeedOutput], model: Amor, allowed: float
) -> Finding:
    """Compare two ways of feeding row by row, each row up to its first tie."""
    logits, scores, states = list[float](), list[float](), list[float]()
    tokens = flips = ties = 0
    for a, b in zip(plain, other, strict=True):
        a = a.since(b.start)
        if a.logits.shape != b.logits.shape or a.fires.shape != b.fires.shape:
            return Finding(way, float("inf"), float("inf"), float("inf"))
        same, flipped, tied = decisions(a, b, _near(a, model, allowed))
        flips, ties, tokens = flips + flipped, ties + tied, tokens + same
        logits.append(_difference(a.logits[:, :same], b.logits[:, :same]))
        both = zip(a.scores.unbind(1), b.scores.unbind(1), strict=True)
        scores += [_difference(x[:, :same], y[:, :same]) for x, y in both]
        if a.state is not None and b.state is not None:
            end = b.start + same if tied else None
            depth = len(model.backbone.layers)
            states.append(_state_difference(a.state, b.state, depth, end))
    far = any(gap > allowed for gap in (*logits, *scores, *states))
    gaps = (max(each, default=float("nan")) for each in (logits, scores, states))
    of_logits, of_scores, of_states = gaps
    ok = flips == 0 and tokens > 0 and not far
    return Finding(way, of_logits, of_scores, of_states, tokens, flips, ties, ok)


def decisions(a: FeedOutput, b: FeedOutput, near: Tensor) -> tuple[int, int, int]:
    """Tokens before the first tie; decisions up to it that differ although the score is clear;
    whether there is a tie.

    Decisions are ordered by token and within a token by block; one at the threshold may fall either
    way, and all that come after it may differ.
    """
    differ = (a.fires != b.fires)[0].T.flatten()  # [T * K]
    ties = (differ & near[0].T.flatten()).nonzero().flatten().tolist()
    if not ties:
        return a.logits.shape[1], int(differ.sum()), 0
    return ties[0] // near.shape[1], int(differ[: ties[0]].sum()), 1


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest number of a; inf for nan and other shapes."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    gap = ((a - b).abs().max() / a.abs().max().clamp(min=1e-6)).item()
    return gap if gap == gap else float("inf")


def _state_difference(a: State, b: State, depth: int, tie: int | None) -> float:
    """The largest difference; keys and values of blocks, which come after `depth` layers, only up
    to a tie."""
    if not torch.equal(a.position, b.position):
        return float("inf")
    length, worst = int(a.position[0]), 0.0
    for index, (mine, theirs) in enumerate(zip(a.parts, b.parts, strict=True)):
        for name, kept in mine.items():
            other = theirs[name]
            if isinstance(kept, KV) and isinstance(other, KV):
                slots = length if tie is None or index < depth else tie
                for x, y in ((kept.k, other.k), (kept.v, other.v)):
                    worst = max(worst, _difference(x[:, :, :slots], y[:, :, :slots]))
            elif isinstance(kept, Tensor) and isinstance(other, Tensor):
                worst = max(worst, _difference(kept, other))
    return worst
