"""Evaluations as tables: ours with their errors, the floor, and the paper's rows apart; what is marked as better clearly is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from amor.errors import AmorError
from amor.study import evals, paper
from amor.study.evals import PHASES, Judged
from amor.study.paired import Gap, gap, mean_gap
from amor.study.suites import LENGTHS, Column, Suite, shown, suite

Kind = Literal["ours", "floor", "paper"]


@dataclass(frozen=True)
class Cell:
    """A number as it is shown."""

    value: float
    error: float | None = None
    digits: int = 1
    best: bool = False  # ahead of every other row of ours by more than two paired errors
    floor: bool = False  # within two paired errors of the floor


@dataclass(frozen=True)
class Line:
    name: str
    kind: Kind
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    title: str
    first: str  # above the names
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    paper: str = ""  # whose rows stand below
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What to show of which folders."""

    folders: tuple[Path, ...]
    floor: Path | None = None
    scale: str | None = None  # of the paper's rows; None: the suite's own
    ablations: bool = False
    gates: bool = False  # rows of closed and open gates, and a column of firing rates
    decode: bool = False
    bucket: bool = False


@dataclass(frozen=True)
class Held:
    """Everything that stands in the tables of a suite, read and found comparable."""

    name: str
    rows: list[Judged]
    floor: Judged | None
    labels: list[str]
    bucket: bool = False  # of curves: the last tokens before each length


def read(name: str, asked: Asked) -> Held:
    rows = [
        judged
        for folder in asked.folders
        for judged in (
            evals.variants(folder, name, asked.decode) if asked.gates else [evals.opened(folder, name, decode=asked.decode)]
        )
    ]
    floor = evals.opened(asked.floor, name, decode=asked.decode) if asked.floor else None
    if floor and floor.found.amor.model.tokens:
        trained = f"amor.model.tokens is {floor.found.amor.model.tokens:,}"
        raise AmorError(f"{floor.file}: {trained}; a floor is a model that was trained on 0")
    evals.side_by_side([*rows, *([floor] if floor else [])])
    return Held(name, rows, floor, evals.labels(rows), asked.bucket)


def tables(name: str, asked: Asked) -> Iterator[Table]:
    """The table of a suite; of length-extrapolation one a set of texts."""
    held = read(name, asked)
    if name == LENGTHS:
        yield from curves(held)
    else:
        yield scores(held, asked)


def scores(held: Held, asked: Asked) -> Table:
    """Rows are models, columns those of the paper."""
    known = suite(held.name)
    everyone = [*held.rows, *([held.floor] if held.floor else [])]
    columns = shown(evals.columns(held.name, everyone), lambda c: any(row.score(c) for row in everyone))
    averaged = tuple(column for column in columns if column.percent) if known.average else ()
    lines = [Line(label, "ours", cells(row, held, columns, averaged)) for label, row in zip(held.labels, held.rows)]
    if held.floor:
        lines.append(Line(f"floor: {evals.labels([held.floor])[0]}", "floor", cells(held.floor, held, columns, averaged)))
    if asked.gates:
        rates = [row.rate for row in everyone]
        lines = [
            Line(line.name, line.kind, (*line.cells, None if rate is None else Cell(rate, digits=3)))
            for line, rate in zip(lines, rates)
        ]
    scale = asked.scale or known.scale
    theirs = paper_lines(known, columns, bool(averaged), asked.gates, scale, asked.ablations)
    titles = (*(c.title for c in columns), *(["Avg"] if averaged else []), *(["fires"] if asked.gates else []))
    remarks = list(notes(held, columns))
    if theirs:
        remarks += [f"paper: {known.remark}"] if known.remark else []
    else:
        there = sorted({row.scale for row in paper.tables()[known.table].rows})
        remarks.append(f"paper: no {held.name} at {scale}, only at {', '.join(there)}")
    return Table(held.name, "model", titles, (*lines, *theirs), f"the paper, {scale}", tuple(remarks))


def cells(row: Judged, held: Held, columns: tuple[Column, ...], averaged: tuple[Column, ...]) -> tuple[Cell | None, ...]:
    others = [other for other in held.rows if other is not row] if row is not held.floor else []
    floor = held.floor if row is not held.floor else None
    found: list[Cell | None] = [_cell(row, [c], others, floor) for c in columns]
    return (*found, _cell(row, list(averaged), others, floor)) if averaged else tuple(found)


def _cell(row: Judged, columns: list[Column], others: list[Judged], floor: Judged | None) -> Cell | None:
    """One task, or the mean of several, which must all be there."""
    if any(row.score(column) is None for column in columns):
        return None
    value, error = level(row, columns)
    gaps = [difference(row, other, columns) for other in others]
    above = difference(row, floor, columns) if floor else None
    return Cell(
        value,
        error,
        columns[0].digits,
        best=bool(gaps) and all(g is not None and g.clear for g in gaps),
        floor=above is not None and above.none,
    )


def level(row: Judged, columns: list[Column]) -> tuple[float, float | None]:
    """The mean of tasks that a row has, as it is shown, and its standard error where every task has one."""
    told = [score for column in columns if (score := row.score(column)) is not None]
    factor, errors = columns[0].shown, [error for _, error in told if error is not None]
    error = factor * sum(e**2 for e in errors) ** 0.5 / len(told) if len(errors) == len(told) else None
    return factor * sum(value for value, _ in told) / len(told), error


def difference(a: Judged, b: Judged, columns: list[Column]) -> Gap | None:
    """By how much `a` is better, from documents; None where they are not told."""
    gaps = []
    for column in columns:
        both = evals.paired(a, b, column)
        one = gap(*both) if both else None
        if one is None:
            return None
        gaps.append(one)
    return mean_gap(gaps)


def paper_lines(
    known: Suite, columns: tuple[Column, ...], average: bool, gates: bool, scale: str, ablations: bool
) -> tuple[Line, ...]:
    keys = [(column.paper, column.digits) for column in columns] + [("avg", 1)] * average + [("", 0)] * gates
    found = paper.rows((known.table, *(known.ablations if ablations else ())), scale)
    return tuple(
        Line(model, "paper", tuple(Cell(values[key], digits=digits) if key in values else None for key, digits in keys))
        for model, values in found.items()
    )


def curves(held: Held) -> Iterator[Table]:
    """Rows are lengths, columns models; one table a set of texts."""
    everyone = [*held.rows, *([held.floor] if held.floor else [])]
    names = tuple(held.labels) + (("floor",) if held.floor else ())
    sets = list(dict.fromkeys(name for row in everyone for name in row.found.amor.curves))
    if not sets:
        raise AmorError(f"{everyone[0].file}: amor.curves holds no set of texts")
    for number, name in enumerate(sets):
        points = [_points(row, name, held.bucket) for row in everyone]
        lengths = sorted({length for point in points for length in point})
        lines = tuple(Line(f"{length:,}", "ours", tuple(point.get(length) for point in points)) for length in lengths)
        kind = "perplexity of the last 1,024 tokens before each length" if held.bucket else "perplexity of whole prefixes"
        remarks = tuple(notes(held, ())) if number == len(sets) - 1 else ()
        segments = {row.found.amor.curves[name].segments for row in everyone if name in row.found.amor.curves}
        title = f"{held.name}, {name}: {kind}, {'/'.join(map(str, sorted(segments)))} segments"
        yield Table(title, "tokens", names, lines, notes=remarks)


def _points(row: Judged, name: str, bucket: bool) -> dict[int, Cell | None]:
    curve = row.found.amor.curves.get(name)
    if curve is None:
        return {}
    values = zip(curve.lengths, curve.bucket if bucket else curve.prefix, curve.errors)
    return {length: Cell(value, None if bucket else error, digits=2) for length, value, error in values}


def notes(held: Held, columns: tuple[Column, ...]) -> Iterator[str]:
    """What stands under a table: how the numbers came about, and what is not there."""
    for label, row in zip([*held.labels, "floor"], [*held.rows, *([held.floor] if held.floor else [])]):
        yield f"{label}: {'; '.join(_provenance(row))}"
    shapes = {row.found.amor.model.parameters for row in held.rows}
    if held.floor and held.floor.found.amor.model.parameters not in shapes:
        yield "floor: of another shape than every row; an untrained model of the same shape is a fairer one"
    lengths = {task: round(mean) for row in held.rows for task, mean in row.found.amor.lengths.items()}
    if lengths:
        yield f"true tokens of prompts, mean: {', '.join(f'{task} {mean:,}' for task, mean in sorted(lengths.items()))}"
    reasons = {(task, why) for row in held.rows for task, why in row.found.amor.skipped.items()}
    for task, why in sorted(reasons):
        yield f"skipped: {task} ({' '.join(why.split())})"
    yield from _unpaired(held, columns)


def _provenance(row: Judged) -> Iterator[str]:
    model, settings = row.found.amor.model, row.found.amor.settings
    yield "tokens trained on not known" if model.tokens is None else f"trained on {model.tokens:,} tokens"
    yield f"{model.parameters:,} parameters"
    if row.documents_judged:
        yield f"{row.documents_judged:,} documents" + (f" (at most {settings.limit:,} a task)" if settings.limit else "")
    yield f"gates {settings.gates}, {settings.path}"
    if settings.max_length:
        yield f"at most {settings.max_length:,} tokens a request"
    if settings.bos:
        yield "the tokenizer's first token before each context"
    if settings.harness:
        yield f"lm-eval {settings.harness}"
    for phase in PHASES:
        if rates := row.fired(phase):
            yield f"fires in {phase} {' '.join(f'{rate:.3f}' for rate in rates)}"


def _unpaired(held: Held, columns: tuple[Column, ...]) -> Iterator[str]:
    """Tasks whose documents are not told: nothing about them can be said to be clear."""
    rows = [*held.rows, *([held.floor] if held.floor else [])]
    if len(rows) < 2:
        return
    blind = [c.title for c in columns if any(row.score(c) and row.documents(c) is None for row in rows)]
    if blind:
        yield f"not compared, for want of numbers a document: {', '.join(blind)}"
