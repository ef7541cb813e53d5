"""Several runs side by side: what each reached, after how many tokens and minutes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from amor import typed
from amor.checks import Vocab
from amor.errors import AmorError
from amor.presets import scaled
from amor.records.run import Architecture, Evaluated, Step, Valid
from amor.run import Run
from amor.study.table import Cell, Table, TableRow


@dataclass(frozen=True)
class ValidPoint:
    """The held-out loss after so many tokens and minutes."""

    tokens: int
    minutes: float
    nll: float


@dataclass(frozen=True)
class FiringPoint:
    """The firing rate of every block at a step of training."""

    tokens: int  # seen so far
    fire: tuple[float, ...]  # share of tokens, one per block


@dataclass(frozen=True)
class RunSummary:
    """A run as a row of a table and as curves of a figure."""

    run: str
    model: str
    vocab: int
    tokens: int
    minutes: float
    tokens_per_second: float
    loss: float | None
    valid: Valid | None
    curve: tuple[ValidPoint, ...]
    firing: tuple[FiringPoint, ...]


def compare(folders: list[Run]) -> list[RunSummary]:
    """One summary per run; runs of different vocabularies are refused."""
    rows = [summarise(folder) for folder in folders]
    vocabularies = {row.vocab for row in rows}
    if len(vocabularies) > 1:
        lack = "their losses a token cannot be compared"
        raise AmorError(f"runs with vocabularies of {sorted(vocabularies)}: {lack}")
    return rows


def measured(run: Run) -> tuple[list[Step], list[Evaluated]]:
    """The steps and the evaluations of a run, which must have begun; all steps have as many
    blocks."""
    if not run.used:
        lack = "is not a run directory (it has no config.json)"
        raise AmorError(f"{run.folder} {lack}; amor train --out RUN writes one")
    lines = list(run.lines())
    steps = [line for line in lines if isinstance(line, Step)]
    if not steps:
        raise AmorError(f"{run.folder} holds no metrics yet; nothing has been trained in it")
    first = steps[0]
    for line in steps:
        if len(line.blocks) != len(first.blocks):
            wrong = f"step {line.step} has {len(line.blocks)} blocks"
            wrong = f"{wrong}, step {first.step} has {len(first.blocks)}"
            raise AmorError(f"{run.metrics}: {wrong}; of one run they are as many")
    return steps, [line for line in lines if isinstance(line, Evaluated)]


def summarise(run: Run) -> RunSummary:
    """One run as a row of a table and as curves."""
    steps, evals = measured(run)
    minutes, passed = {}, 0.0
    for line in steps:
        passed += line.timing.seconds / 60
        minutes[line.step] = passed
    tokens = {line.step: line.tokens for line in steps}
    sound = [e for e in evals if e.valid.nll is not None]
    losses = [line.loss for line in steps if line.loss is not None]
    model = run.recipe().model
    return RunSummary(
        run=run.folder.name,
        model=model.name,
        vocab=vocabulary(run, model),
        tokens=steps[-1].tokens,
        minutes=passed,
        tokens_per_second=statistics.median(line.timing.tokens_per_second for line in steps),
        loss=statistics.mean(losses[-20:]) if losses else None,
        valid=sound[-1].valid if sound else None,
        curve=tuple(
            ValidPoint(tokens[e.step], minutes[e.step], e.valid.nll)
            for e in sound
            if e.step in tokens and e.valid.nll is not None
        ),
        firing=tuple(
            FiringPoint(line.tokens, tuple(b.fire for b in line.blocks))
            for line in steps
            if line.blocks
        ),
    )


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values at each place, of as many as there are at the
    beginning."""
    total, out = 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        out.append(total / min(index + 1, width))
    return out


class Vocabulary(msgspec.Struct, frozen=True):
    """The one key of a model's config that a comparison needs; the others are left to those who
    open models."""

    vocab: Vocab


def vocabulary(run: Run, model: Architecture) -> int:
    """Tokens of a run's vocabulary: its preset's with the recipe's change, or those of the config
    beside its newest weights."""
    if not model.start:
        changed = {"vocab": scaled(model.scale)["vocab"]} | model.changes
        return typed.convert(Vocabulary, changed, f"{run.config}: model.changes").vocab
    return typed.read(Vocabulary, run.folder / "latest/config.json").vocab


def table(rows: list[RunSummary]) -> Table:
    """The runs for people, one row each."""
    lines = []
    for row in rows:
        nll, perplexity = (row.valid.nll, row.valid.perplexity) if row.valid else (None, None)
        speed = ((row.minutes, 1), (row.tokens_per_second, 0))
        numbers = (*speed, (row.loss, 3), (nll, 3), (perplexity, 1))
        cells = (None if value is None else Cell(value, digits=digits) for value, digits in numbers)
        lines.append(TableRow(row.run, (f"{row.tokens:,}", *cells)))
    columns = ("tokens", "minutes", "tokens/s", "train loss", "valid loss", "perplexity")
    return Table("Runs side by side", "run", columns, tuple(lines))
