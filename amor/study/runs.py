"""Several runs side by side: what each reached, after how many tokens and minutes."""

import statistics
from dataclasses import dataclass

import msgspec

from amor import typed
from amor.checks import Vocab
from amor.errors import AmorError
from amor.presets import scaled
from amor.records.run import Architecture, Evaluated, Step, Valid
from amor.run import Run


@dataclass(frozen=True)
class Reached:
    """The held-out loss after so many tokens and minutes."""

    tokens: int
    minutes: float
    nll: float


@dataclass(frozen=True)
class Fired:
    tokens: int
    fire: tuple[float, ...]  # a block


@dataclass(frozen=True)
class Told:
    """A run as a row of a table and as lines of a figure."""

    run: str
    model: str
    vocab: int
    tokens: int
    minutes: float
    tokens_per_second: float
    loss: float | None
    valid: Valid | None
    curve: tuple[Reached, ...]
    firing: tuple[Fired, ...]


def compare(folders: list[Run]) -> list[Told]:
    """A row a run, and the curves a figure draws."""
    rows = [told(folder) for folder in folders]
    vocabularies = {row.vocab for row in rows}
    if len(vocabularies) > 1:
        raise AmorError(f"runs with vocabularies of {sorted(vocabularies)}: their losses a token cannot be compared")
    return rows


def measured(run: Run) -> tuple[list[Step], list[Evaluated]]:
    """The steps and the evaluations of a run, which must have begun; all steps have as many blocks."""
    if not run.used:
        raise AmorError(f"{run.folder} is not a run directory (it has no config.json); amor train --out RUN writes one")
    steps: list[Step] = []
    evals: list[Evaluated] = []
    for line in run.lines():
        if isinstance(line, Evaluated):
            evals.append(line)
            continue
        if steps and len(line.blocks) != len(steps[0].blocks):
            wrong = f"step {line.step} has {len(line.blocks)} blocks, step {steps[0].step} has {len(steps[0].blocks)}"
            raise AmorError(f"{run.metrics}: {wrong}; of one run they are as many")
        steps.append(line)
    if not steps:
        raise AmorError(f"{run.folder} holds no metrics yet; nothing has been trained in it")
    return steps, evals


def told(run: Run) -> Told:
    steps, evals = measured(run)
    minutes, passed = {}, 0.0
    for line in steps:
        passed += line.timing.seconds / 60
        minutes[line.step] = passed
    tokens = {line.step: line.tokens for line in steps}
    sound = [e for e in evals if e.valid.nll is not None]
    losses = [line.loss for line in steps if line.loss is not None]
    model = run.recipe().model
    return Told(
        run=run.folder.name,
        model=model.name,
        vocab=vocabulary(run, model),
        tokens=steps[-1].tokens,
        minutes=passed,
        tokens_per_second=statistics.median(line.timing.tokens_per_second for line in steps),
        loss=statistics.mean(losses[-20:]) if losses else None,
        valid=sound[-1].valid if sound else None,
        curve=tuple(
            Reached(tokens[e.step], minutes[e.step], e.valid.nll) for e in sound if e.step in tokens and e.valid.nll is not None
        ),
        firing=tuple(Fired(line.tokens, tuple(b.fire for b in line.blocks)) for line in steps if line.blocks),
    )


class Vocabulary(msgspec.Struct, frozen=True):
    """The one key of a model's config that a comparison needs; the others are left to those who open models."""

    vocab: Vocab


def vocabulary(run: Run, model: Architecture) -> int:
    """Tokens of a run's vocabulary: its preset's with the recipe's change, or those of the config beside its newest weights."""
    if not model.start:
        changed = {"vocab": scaled(model.scale)["vocab"]} | model.changes
        return typed.convert(Vocabulary, changed, f"{run.config}: model.changes").vocab
    return typed.read(Vocabulary, run.folder / "latest/config.json").vocab


def lines(rows: list[Told]) -> list[str]:
    """The table for people."""
    shown = [
        f"{'run':<24} {'tokens':>12} {'minutes':>8} {'tokens/s':>9} {'train loss':>11} {'valid loss':>11} {'perplexity':>11}"
    ]
    for row in rows:
        nll, perplexity = (row.valid.nll, row.valid.perplexity) if row.valid else (None, None)
        shown.append(
            f"{row.run:<24} {row.tokens:>12,} {row.minutes:>8.1f} {row.tokens_per_second:>9,.0f} "
            f"{_or_dash(row.loss, '.3f'):>11} {_or_dash(nll, '.3f'):>11} {_or_dash(perplexity, ',.1f'):>11}"
        )
    return shown


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
