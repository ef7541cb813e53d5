"""Evaluations as tables: ours with their errors, the floor, and the paper's rows apart; what is
marked as better clearly is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from amor.errors import AmorError
from amor.study import evals, paper
from amor.study.evals import PHASES, SuiteResult
from amor.study.paired import Gap, gap, mean_gap
from amor.study.suites import LENGTHS, ScoreColumn, Suite, shown, suite
from amor.study.table import Cell, Table, TableRow


@dataclass(frozen=True)
class TableRequest:
    """Which evaluation folders are shown, and how."""

    folders: tuple[Path, ...]
    floor: Path | None = None  # evaluation of an untrained model of the same shape
    scale: str | None = None  # of the paper's rows; None: the suite's own
    ablations: bool = False  # the rows of the paper's ablations too
    gates: bool = False  # rows of closed and open gates, and a column of firing rates
    decode: bool = False  # the files that were evaluated token by token
    bucket: bool = (
        False  # of curves: the last 1,024 tokens before each length instead of whole prefixes
    )


@dataclass(frozen=True)
class SuiteRows:
    """Every row of the tables of one suite, read and checked to be comparable."""

    name: str
    rows: list[SuiteResult]
    floor: SuiteResult | None
    labels: list[str]
    bucket: bool = False  # as in TableRequest


def read(name: str, request: TableRequest) -> SuiteRows:
    """Read the evaluations that are shown, and refuse those that cannot be compared."""
    rows = [
        judged
        for folder in request.folders
        for judged in (
            evals.variants(folder, name, request.decode)
            if request.gates
            else [evals.opened(folder, name, decode=request.decode)]
        )
    ]
    floor = evals.opened(request.floor, name, decode=request.decode) if request.floor else None
    if floor and floor.evaluation.amor.model.tokens:
        trained = f"amor.model.tokens is {floor.evaluation.amor.model.tokens:,}"
        raise AmorError(f"{floor.file}: {trained}; a floor is a model that was trained on 0")
    evals.side_by_side([*rows, *([floor] if floor else [])])
    return SuiteRows(name, rows, floor, evals.labels(rows), request.bucket)


def tables(name: str, request: TableRequest) -> Iterator[Table]:
    """The table of a suite; of length-extrapolation one per set of texts."""
    suite_rows = read(name, request)
    if name == LENGTHS:
        yield from curves(suite_rows)
    else:
        yield scores(suite_rows, request)


def scores(suite_rows: SuiteRows, request: TableRequest) -> Table:
    """Rows are models, columns those of the paper."""
    known = suite(suite_rows.name)
    everyone = [*suite_rows.rows, *([suite_rows.floor] if suite_rows.floor else [])]
    columns = shown(
        evals.columns(suite_rows.name, everyone), lambda c: any(row.score(c) for row in everyone)
    )
    averaged = tuple(column for column in columns if column.percent) if known.average else ()
    lines = [
        TableRow(label, cells(row, suite_rows, columns, averaged))
        for label, row in zip(suite_rows.labels, suite_rows.rows)
    ]
    if suite_rows.floor:
        name = f"floor: {evals.labels([suite_rows.floor])[0]}"
        lines.append(
            TableRow(name, cells(suite_rows.floor, suite_rows, columns, averaged), "floor")
        )
    if request.gates:
        rates = [row.rate for row in everyone]
        lines = [
            TableRow(
                line.name, (*line.cells, None if rate is None else Cell(rate, digits=3)), line.kind
            )
            for line, rate in zip(lines, rates)
        ]
    scale = request.scale or known.scale
    theirs = paper_lines(known, columns, bool(averaged), request.gates, scale, request.ablations)
    titles = (
        *(c.title for c in columns),
        *(["Avg"] if averaged else []),
        *(["fires"] if request.gates else []),
    )
    remarks = list(notes(suite_rows, columns))
    if theirs:
        remarks += [f"paper: {known.remark}"] if known.remark else []
    else:
        there = sorted({row.scale for row in paper.tables()[known.table].rows})
        remarks.append(f"paper: no {suite_rows.name} at {scale}, only at {', '.join(there)}")
    return Table(
        suite_rows.name, "model", titles, (*lines, *theirs), f"the paper, {scale}", tuple(remarks)
    )


def cells(
    row: SuiteResult,
    suite_rows: SuiteRows,
    columns: tuple[ScoreColumn, ...],
    averaged: tuple[ScoreColumn, ...],
) -> tuple[Cell | None, ...]:
    """One cell per column of one row, and the average of `averaged`."""
    others = (
        [other for other in suite_rows.rows if other is not row]
        if row is not suite_rows.floor
        else []
    )
    floor = suite_rows.floor if row is not suite_rows.floor else None
    found: list[Cell | None] = [_cell(row, [c], others, floor) for c in columns]
    return (*found, _cell(row, list(averaged), others, floor)) if averaged else tuple(found)


def _cell(
    row: SuiteResult,
    columns: list[ScoreColumn],
    others: list[SuiteResult],
    floor: SuiteResult | None,
) -> Cell | None:
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


def level(row: SuiteResult, columns: list[ScoreColumn]) -> tuple[float, float | None]:
    """The mean of tasks that a row has, as it is shown, and its standard error where every task has
    one."""
    known = [score for column in columns if (score := row.score(column)) is not None]
    factor, errors = columns[0].factor, [error for _, error in known if error is not None]
    error = (
        factor * sum(e**2 for e in errors) ** 0.5 / len(known)
        if len(errors) == len(known)
        else None
    )
    return factor * sum(value for value, _ in known) / len(known), error


def difference(a: SuiteResult, b: SuiteResult, columns: list[ScoreColumn]) -> Gap | None:
    """By how much `a` is better, from documents; None where they are not known."""
    gaps = []
    for column in columns:
        both = evals.paired(a, b, column)
        one = gap(*both) if both else None
        if one is None:
            return None
        gaps.append(one)
    return mean_gap(gaps)


def paper_lines(
    known: Suite,
    columns: tuple[ScoreColumn, ...],
    average: bool,
    gates: bool,
    scale: str,
    ablations: bool,
) -> tuple[TableRow, ...]:
    """The paper's rows in our columns; a dash where it prints no number."""
    keys = (
        [(column.paper, column.digits) for column in columns]
        + [("avg", 1)] * average
        + [("", 0)] * gates
    )
    found = paper.rows((known.table, *(known.ablations if ablations else ())), scale)
    return tuple(
        TableRow(
            model,
            tuple(
                Cell(values[key], digits=digits) if key in values else None for key, digits in keys
            ),
            "paper",
        )
        for model, values in found.items()
    )


def curves(suite_rows: SuiteRows) -> Iterator[Table]:
    """Rows are lengths, columns models; one table per set of texts."""
    everyone = [*suite_rows.rows, *([suite_rows.floor] if suite_rows.floor else [])]
    names = tuple(suite_rows.labels) + (("floor",) if suite_rows.floor else ())
    sets = text_sets(everyone)
    for number, name in enumerate(sets):
        points = [_points(row, name, suite_rows.bucket) for row in everyone]
        lengths = sorted({length for point in points for length in point})
        lines = tuple(
            TableRow(f"{length:,}", tuple(point.get(length) for point in points))
            for length in lengths
        )
        kind = (
            "perplexity of the last 1,024 tokens before each length"
            if suite_rows.bucket
            else "perplexity of whole prefixes"
        )
        remarks = tuple(notes(suite_rows, ())) if number == len(sets) - 1 else ()
        segments = {
            row.evaluation.amor.curves[name].segments
            for row in everyone
            if name in row.evaluation.amor.curves
        }
        title = (
            f"{suite_rows.name}, {name}: {kind}, {'/'.join(map(str, sorted(segments)))} segments"
        )
        yield Table(title, "tokens", names, lines, notes=remarks)


def text_sets(rows: list[SuiteResult]) -> list[str]:
    """Sets of texts that any of the rows has a curve of."""
    sets = list(dict.fromkeys(name for row in rows for name in row.evaluation.amor.curves))
    if not sets:
        raise AmorError(f"{rows[0].file}: amor.curves holds no set of texts")
    return sets


def _points(row: SuiteResult, name: str, bucket: bool) -> dict[int, Cell | None]:
    curve = row.evaluation.amor.curves.get(name)
    if curve is None:
        return {}
    values = zip(curve.lengths, curve.bucket if bucket else curve.prefix, curve.errors)
    return {
        length: Cell(value, None if bucket else error, digits=2) for length, value, error in values
    }


def notes(suite_rows: SuiteRows, columns: tuple[ScoreColumn, ...]) -> Iterator[str]:
    """What stands under a table: how the numbers came about, and what is not there."""
    for label, row in zip(
        [*suite_rows.labels, "floor"],
        [*suite_rows.rows, *([suite_rows.floor] if suite_rows.floor else [])],
    ):
        yield f"{label}: {'; '.join(_provenance(row))}"
    shapes = {row.evaluation.amor.model.parameters for row in suite_rows.rows}
    if suite_rows.floor and suite_rows.floor.evaluation.amor.model.parameters not in shapes:
        yield (
            "floor: of another shape than every row; an untrained model of the same shape is "
            "a fairer one"
        )
    lengths = {
        task: round(mean)
        for row in suite_rows.rows
        for task, mean in row.evaluation.amor.lengths.items()
    }
    if lengths:
        yield (
            "true tokens of prompts, mean: "
            f"{', '.join(f'{task} {mean:,}' for task, mean in sorted(lengths.items()))}"
        )
    reasons = {
        (task, why) for row in suite_rows.rows for task, why in row.evaluation.amor.skipped.items()
    }
    for task, why in sorted(reasons):
        yield f"skipped: {task} ({' '.join(why.split())})"
    yield from _unpaired(suite_rows, columns)


def _provenance(row: SuiteResult) -> Iterator[str]:
    model, settings = row.evaluation.amor.model, row.evaluation.amor.settings
    yield (
        "tokens trained on not known"
        if model.tokens is None
        else f"trained on {model.tokens:,} tokens"
    )
    yield f"{model.parameters:,} parameters"
    if row.documents_judged:
        yield f"{row.documents_judged:,} documents" + (
            f" (at most {settings.limit:,} per task)" if settings.limit else ""
        )
    yield f"gates {settings.gates}, {settings.path}"
    if settings.max_length:
        yield f"at most {settings.max_length:,} tokens per request"
    if settings.bos:
        yield "the tokenizer's first token before each context"
    if settings.harness:
        yield f"lm-eval {settings.harness}"
    for phase in PHASES:
        if rates := row.fired(phase):
            yield f"fires in {phase} {' '.join(f'{rate:.3f}' for rate in rates)}"


def _unpaired(suite_rows: SuiteRows, columns: tuple[ScoreColumn, ...]) -> Iterator[str]:
    """Tasks whose documents are not known: nothing about them is clear."""
    rows = [*suite_rows.rows, *([suite_rows.floor] if suite_rows.floor else [])]
    if len(rows) < 2:
        return
    blind = [
        c.title for c in columns if any(row.score(c) and row.documents(c) is None for row in rows)
    ]
    if blind:
        yield f"not compared, for want of numbers per document: {', '.join(blind)}"
