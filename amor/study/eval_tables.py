"""Evaluations as tables: ours with their errors, the floor, and the paper's rows apart; what is
marked as better clearly is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from amor.errors import AmorError
from amor.eval.tasks import LENGTHS, ScoreColumn, suite
from amor.study import evals, paper
from amor.study.evals import PHASES, SuiteResult
from amor.study.paired import Gap, gap, mean_gap
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
    # of curves: the last 1,024 tokens before each length instead of whole prefixes
    bucket: bool = False


@dataclass(frozen=True)
class SuiteRows:
    """Every row of the tables of one suite, read and checked to be comparable."""

    name: str
    rows: list[SuiteResult]
    floor: SuiteResult | None
    bucket: bool = False  # as in TableRequest

    @cached_property
    def labels(self) -> list[str]:
        """A name per row, without the floor."""
        return evals.labels(self.rows)

    @property
    def everyone(self) -> list[SuiteResult]:
        """All rows, and the floor where there is one."""
        return [*self.rows, *([self.floor] if self.floor else [])]


class TableColumn(NamedTuple):
    """A column of a table of scores: one task, or the mean of several, and the paper's column."""

    title: str
    tasks: tuple[ScoreColumn, ...]
    paper: str


def read(name: str, request: TableRequest) -> SuiteRows:
    """Read the evaluations that are shown, and refuse those that cannot be compared."""
    rows = []
    for folder in request.folders:
        opened = evals.opened(folder, name, decode=request.decode)
        rows += evals.variants(opened) if request.gates else [opened]
    floor = evals.opened(request.floor, name, decode=request.decode) if request.floor else None
    if floor and floor.evaluation.amor.model.tokens:
        trained = f"amor.model.tokens is {floor.evaluation.amor.model.tokens:,}"
        raise AmorError(f"{floor.file}: {trained}; a floor is a model that was trained on 0")
    read = SuiteRows(name, rows, floor, request.bucket)
    evals.check_comparable(read.everyone)
    return read


def tables(name: str, request: TableRequest) -> Iterator[Table]:
    """The table of a suite; of length-extrapolation one per set of texts."""
    suite_rows = read(name, request)
    if name == LENGTHS:
        yield from curves(suite_rows)
    else:
        yield scores(suite_rows, request)


def scores(suite_rows: SuiteRows, request: TableRequest) -> Table:
    """Rows are models, columns those of the paper."""
    known, columns = suite(suite_rows.name), shown_columns(suite_rows)
    heads = [TableColumn(column.title, (column,), column.paper) for column in columns]
    averaged = tuple(column for column in columns if column.percent)
    heads += [TableColumn("Avg", averaged, "avg")] if known.average and averaged else []

    def line(name: str, row: SuiteResult, kind: Literal["ours", "floor"] = "ours") -> TableRow:
        cells = [score_cell(row, head.tasks, suite_rows) for head in heads]
        fires = None if row.rate is None else Cell(row.rate, digits=3)
        return TableRow(name, (*cells, *([fires] if request.gates else [])), kind)

    lines = [line(name, row) for name, row in zip(suite_rows.labels, suite_rows.rows)]
    if suite_rows.floor:
        name = f"floor: {evals.labels([suite_rows.floor])[0]}"
        lines.append(line(name, suite_rows.floor, "floor"))
    scale = request.scale or known.scale
    named = (known.table, *(known.ablations if request.ablations else ()))
    for model, values in paper.rows(named, scale).items():
        theirs = (
            Cell(values[head.paper], digits=head.tasks[0].digits) if head.paper in values else None
            for head in heads
        )
        lines.append(TableRow(model, (*theirs, *([None] if request.gates else [])), "paper"))
    remarks = [*notes(suite_rows, columns)]
    if lines[-1].kind == "paper":
        remarks += [f"paper: {known.remark}"] if known.remark else []
    else:
        there = sorted({row.scale for row in paper.tables()[known.table].rows})
        remarks.append(f"paper: no {suite_rows.name} at {scale}, only at {', '.join(there)}")
    titles = (*(head.title for head in heads), *(["fires"] if request.gates else []))
    below = f"the paper, {scale}"
    return Table(suite_rows.name, "model", titles, tuple(lines), below, tuple(remarks))


def shown_columns(suite_rows: SuiteRows) -> list[ScoreColumn]:
    """The columns that any row has; of the paper's columns that none of ours stands beside, the
    first of ours that would."""
    columns = evals.columns(suite_rows.name, suite_rows.everyone)
    measured = {c for c in columns if any(row.score(c) for row in suite_rows.everyone)}
    taken, kept = {column.paper for column in measured}, []
    for column in columns:
        if column in measured or (column.paper and column.paper not in taken):
            kept.append(column)
            taken.add(column.paper)
    return kept


def score_cell(
    row: SuiteResult, tasks: Sequence[ScoreColumn], suite_rows: SuiteRows
) -> Cell | None:
    """One task, or the mean of several, which must all be there; the floor is compared with
    none."""
    if any(row.score(task) is None for task in tasks):
        return None
    value, error = level(row, tasks)
    ours, floor = row is not suite_rows.floor, suite_rows.floor
    gaps = [difference(row, other, tasks) for other in suite_rows.rows if other is not row and ours]
    above = difference(row, floor, tasks) if floor and ours else None
    best = bool(gaps) and all(gap is not None and gap.clear for gap in gaps)
    return Cell(value, error, tasks[0].digits, best, floor=above is not None and above.none)


def level(row: SuiteResult, tasks: Sequence[ScoreColumn]) -> tuple[float, float | None]:
    """The mean of tasks that a row has, as it is shown, and its standard error where every task has
    one."""
    known = [score for task in tasks if (score := row.score(task)) is not None]
    factor, errors = tasks[0].factor, [error for _, error in known if error is not None]
    whole = len(errors) == len(known)
    error = factor * sum(e**2 for e in errors) ** 0.5 / len(known) if whole else None
    return factor * sum(value for value, _ in known) / len(known), error


def difference(a: SuiteResult, b: SuiteResult, tasks: Sequence[ScoreColumn]) -> Gap | None:
    """By how much `a` is better, from documents; None where they are not known."""
    pairs = [evals.paired(a, b, task) for task in tasks]
    gaps = [each for pair in pairs if pair and (each := gap(*pair)) is not None]
    return mean_gap(gaps) if len(gaps) == len(tasks) else None


def curves(suite_rows: SuiteRows) -> Iterator[Table]:
    """Rows are lengths, columns models; one table per set of texts."""
    everyone, bucket = suite_rows.everyone, suite_rows.bucket
    names = (*suite_rows.labels, *(["floor"] if suite_rows.floor else []))
    meaning = "of the last 1,024 tokens before each length" if bucket else "of whole prefixes"
    sets = text_sets(everyone)
    for name in sets:
        points = [_points(row, name, bucket) for row in everyone]
        lengths = sorted({length for point in points for length in point})
        lines = (TableRow(f"{n:,}", tuple(point.get(n) for point in points)) for n in lengths)
        remarks = tuple(notes(suite_rows, ())) if name == sets[-1] else ()
        known = [row.evaluation.amor.curves for row in everyone]
        segments = sorted({each[name].segments for each in known if name in each})
        shown = f"perplexity {meaning}, {'/'.join(map(str, segments))} segments"
        title = f"{suite_rows.name}, {name}: {shown}"
        yield Table(title, "tokens", names, tuple(lines), notes=remarks)


def text_sets(rows: list[SuiteResult]) -> list[str]:
    """Sets of texts that any of the rows has a curve of."""
    sets = list(dict.fromkeys(name for row in rows for name in row.evaluation.amor.curves))
    if not sets:
        raise AmorError(f"{rows[0].file}: amor.curves holds no set of texts")
    return sets


def _points(row: SuiteResult, name: str, bucket: bool) -> dict[int, Cell]:
    curve = row.evaluation.amor.curves.get(name)
    if curve is None:
        return {}
    values = zip(curve.lengths, curve.bucket if bucket else curve.prefix, curve.errors)
    return {n: Cell(value, None if bucket else error, digits=2) for n, value, error in values}


def notes(suite_rows: SuiteRows, columns: Sequence[ScoreColumn]) -> Iterator[str]:
    """What stands under a table: how the numbers came about, and what is not there."""
    for label, row in zip([*suite_rows.labels, "floor"], suite_rows.everyone):
        yield f"{label}: {'; '.join(_provenance(row))}"
    about = [row.evaluation.amor for row in suite_rows.rows]
    floor, shapes = suite_rows.floor, {each.model.parameters for each in about}
    if floor and floor.evaluation.amor.model.parameters not in shapes:
        fairer = "an untrained model of the same shape is a fairer one"
        yield f"floor: of another shape than every row; {fairer}"
    lengths = {task: round(mean) for each in about for task, mean in each.lengths.items()}
    if lengths:
        means = ", ".join(f"{task} {mean:,}" for task, mean in sorted(lengths.items()))
        yield f"true tokens of prompts, mean: {means}"
    for task, why in sorted({skipped for each in about for skipped in each.skipped.items()}):
        yield f"skipped: {task} ({' '.join(why.split())})"
    everyone = suite_rows.everyone
    blind = [c.title for c in columns if any(r.score(c) and not r.documents(c) for r in everyone)]
    if blind and len(everyone) > 1:
        yield f"not compared, for want of numbers per document: {', '.join(blind)}"


def _provenance(row: SuiteResult) -> Iterator[str]:
    model, settings = row.evaluation.amor.model, row.evaluation.amor.settings
    known = model.tokens is not None
    yield f"trained on {model.tokens:,} tokens" if known else "tokens trained on not known"
    yield f"{model.parameters:,} parameters"
    if row.documents_judged:
        limit = f" (at most {settings.limit:,} per task)" if settings.limit else ""
        yield f"{row.documents_judged:,} documents{limit}"
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
