"""The tables of a study, from its files: rows are what is compared, means are over seeds, differences are paired."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from amor.numbers import perplexity
from amor.records.recall import Recall
from amor.records.study import BlockMean, Reach
from amor.records.value import Choosing, Value
from amor.study import paper_models
from amor.study.paired import Gap, Grid
from amor.study.paper_models import SCALE
from amor.study.results import Results, chosen
from amor.study.table import Cell, Table, TableRow

POLICIES = ("never", "random", "gate", "always", "oracle")
THEIRS = "the paper: perplexity of FineWeb-Edu; firing rate and tokens/s on one H100, after 3K tokens"


def tables(held: Results) -> list[Table]:
    return [MAKERS[name](held) for name in held.study.tables]


def models(held: Results) -> Table:
    """Every row once: size, loss, speed."""
    asked, baseline = held.study.judge.asked(), held.study.baseline
    columns: dict[str, Callable[[str], Cell | None]] = {}
    if "size" in asked:
        columns["M parameters"] = lambda row: _mean((f.parameters / 1e6 for f in held.of(row, "size").values()), 3)
    columns["loss"] = lambda row: _loss(held, row)
    columns["perplexity"] = lambda row: None if (g := held.losses(row)) is None else Cell(perplexity(g.mean), digits=2)
    if baseline is not None:
        columns[f"loss - {baseline}'s"] = lambda row: _over(held, row)
    columns["fires, %"] = lambda row: _fires(held, row)
    if "speed" in asked:
        columns["train tok/s"] = lambda row: _mean((f.train for f in held.of(row, "speed").values()), 0)
        columns["decode tok/s"] = lambda row: _mean((1 / one.seconds for one in held.decode(row, None)), 0)
    lines = [TableRow(row, tuple(make(row) for make in columns.values())) for row in held.ledger.rows]
    theirs = _paper(tuple(columns)) if held.study.paper else []
    remarks = (*notes(held, "loss"), *([THEIRS] if held.study.paper else []))
    return Table(held.study.title, "model", tuple(columns), (*lines, *theirs), f"the paper, {SCALE}", remarks)


def _loss(held: Results, row: str) -> Cell | None:
    return _lowest(row, {name: held.losses(name) for name in held.ledger.rows})


def _lowest(row: str, all_rows: dict[str, Grid | None], sign: int = 1, digits: int = 4) -> Cell | None:
    """A mean; it is best where it lies below (sign -1: above) every other clearly."""
    mine = all_rows[row]
    if mine is None:
        return None
    gaps = [mine.ahead(other) for name, other in all_rows.items() if name != row and other is not None]
    best = bool(gaps) and all(g is not None and Gap(sign * g.size, g.error).clear for g in gaps)
    return Cell(mine.mean, mine.error, digits, best)


def _over(held: Results, row: str) -> Cell | None:
    """Seed by seed and window by window."""
    baseline = _baseline(held, row)
    mine, theirs = held.losses(row), held.losses(baseline)
    ahead = theirs.ahead(mine) if mine is not None and theirs is not None and row != baseline else None
    return None if ahead is None else Cell(ahead.size, ahead.error, 4)


def _baseline(held: Results, row: str) -> str:
    """The row of the run it names that has the same values of the axes; every run has a row of each, in one order."""
    rows, names = held.ledger.rows, [run.name for run in held.study.runs]
    each = len(rows) // len(names)
    assert held.study.baseline is not None
    return rows[names.index(held.study.baseline) * each + rows.index(row) % each]


def _fires(held: Results, row: str) -> Cell | None:
    rates = [rate for found in held.of(row, "loss").values() for rate in found.fire]
    return _mean((100 * rate for rate in rates), 1)


def _mean(values: Iterable[float | None], digits: int) -> Cell | None:
    known = [value for value in values if value is not None]
    return Cell(statistics.mean(known), digits=digits) if known else None


def _paper(columns: Sequence[str]) -> Iterator[TableRow]:
    """The paper's rows in the columns that it has."""
    for model, values in paper_models.told().items():
        cells = {"perplexity": values.perplexity, "train tok/s": values.train, "decode tok/s": values.decode}
        cells["fires, %"] = None if values.fires is None else 100 * values.fires
        digits = {"perplexity": 2, "train tok/s": 0, "decode tok/s": 1, "fires, %": 1}
        shown = (None if (value := cells.get(name)) is None else Cell(value, digits=digits[name]) for name in columns)
        yield TableRow(model, tuple(shown), "paper")


def gates(held: Results) -> Table:
    """Every gate at the end of training."""
    keys = ("mu", "sigma", "tau", "alpha")
    lines = []
    for row in held.ledger.rows:
        for block, each in enumerate(zip(*(found.blocks for found in held.of(row, "gate").values()))):
            lines.append(TableRow(f"{row}, block {block}", (_percent(each), *(_key(each, key) for key in keys))))
    columns = ("fires, %", "μ", "σ", "threshold", "α")
    steps = {found.steps for row in held.ledger.rows for found in held.of(row, "gate").values()}
    last = f"means of the last {' or '.join(f'{n:,}' for n in sorted(steps))} steps of training, over seeds"
    return Table(f"{held.study.title}: gates", "gate", columns, tuple(lines), notes=(last, *lacking(held)))


def _percent(blocks: Sequence[BlockMean]) -> Cell | None:
    return _mean((100 * block.fire for block in blocks), 1)


def _key(blocks: Sequence[BlockMean], key: str) -> Cell | None:
    return _mean((getattr(block, key) for block in blocks), 3)


def value(held: Results) -> Table:
    """What attention saved where it ran, against chance, everywhere and the oracle."""
    lines = []
    for row in held.ledger.rows:
        found: list[Value] = list(held.of(row, "value").values())
        for name in POLICIES if found else ():
            each = [getattr(one.losses, name) for one in found]
            saved = Cell(statistics.mean(one.saved for one in each), _both([(p.saved, p.saved_se) for p in each]), 4)
            fires = _mean((100 * rate for one in each for rate in one.fire_rate), 1)
            lines.append(TableRow(f"{row}: {name}", (_mean((one.nll for one in each), 4), saved, fires)))
    columns = ("loss", "saved over never", "fires, %")
    return Table(f"{held.study.title}: what gates are worth", "policy", columns, tuple(lines), notes=tuple(notes(held, "value")))


def _both(each: Sequence[tuple[float, float]]) -> float:
    """The error of a mean over seeds that were judged on the same windows: that of the windows, and that of the seeds."""
    of_windows = statistics.mean(se for _, se in each)
    of_seeds = statistics.stdev(mean for mean, _ in each) / len(each) ** 0.5 if len(each) > 1 else 0.0
    return float((of_windows**2 + of_seeds**2) ** 0.5)


def rates(held: Results) -> Table:
    """Nats saved at equal firing rates; gates are compared with gates."""
    columns = (*(f"at {100 * rate:g} %" for rate in held.rates), "as trained", "fires, %", "everywhere")
    gated = [row for row in held.ledger.rows if held.of(row, "rates")]
    lines = []
    for row in gated:
        for name in ("gate", "random", "oracle"):
            cells: list[Cell | None] = []
            for rate in held.rates:
                rivals = {other: held.saved(other, name, rate) for other in gated}
                cells.append(_lowest(row, rivals, sign=-1) if name == "gate" else _plain(rivals[row]))
            ends = (_plain(held.saved(row, "as it is")), _own_rate(held, row), _plain(held.saved(row, "always")))
            cells += ends if name == "gate" else [None] * 3
            if any(cells):
                lines.append(TableRow(f"{row}: {name}", tuple(cells)))
    why = {f"{row}: {note}" for row in gated for found in held.of(row, "rates").values() for note in found.notes}
    said = "nats a token saved over never firing, on held-out text; a gate fires on the tokens of its highest scores"
    remarks = (said, *sorted(why), *notes(held, "rates"))
    return Table(f"{held.study.title}: equal firing rates", "policy", columns, tuple(lines), notes=remarks)


def _plain(found: Grid | None) -> Cell | None:
    return None if found is None else Cell(found.mean, found.error, 4)


def _own_rate(held: Results, row: str) -> Cell | None:
    found = [p for f in held.of(row, "rates").values() for p in f.policies if p.name == "as it is"]
    return _mean((100 * rate for policy in found for rate in policy.fire), 1)


def choices(held: Results) -> Table:
    """Nats saved by other gates in front of the same attention, at equal firing rates."""
    asked = held.study.judge.choices
    assert asked is not None
    lines = []
    for row in held.ledger.rows:
        found: list[Choosing] = list(held.of(row, "choices").values())
        for each in zip(*(one.choices for one in found), strict=True):
            cells = []
            for levels in zip(*(choice.levels for choice in each), strict=True):
                mean = statistics.mean(level.saved for level in levels)
                cells.append(Cell(mean, _both([(level.saved, level.se) for level in levels]), 4))
            lines.append(TableRow(f"{row}: {each[0].name}", tuple(cells)))
    columns = tuple(f"at {100 * rate:g} %" for rate in asked.rates)
    said = "nats per token saved over never firing; weights as trained, gates exchanged, each firing on its highest scores"
    remarks = (said, *notes(held, "choices"))
    return Table(f"{held.study.title}: other gates", "chosen by", columns, tuple(lines), notes=remarks)


def frontier(held: Results) -> Table:
    """Loss against cost: every gate at every rate, and as they are models without gates and gates that aim at none."""
    columns = ("loss", "fires in decode, %", "µs a token", "KB a token", "passes over the head")
    lines = [
        TableRow(name, (_plain(loss), *_cost(held, row, rate))) for name, row, rate, loss in points(held) if loss is not None
    ]
    said = "loss on held-out text; time and bytes of decode, one row, float32, the best round"
    return Table(f"{held.study.title}: loss against cost", "model", columns, tuple(lines), notes=(said, *notes(held, "rates")))


def points(held: Results) -> Iterator[tuple[str, str, float | None, Grid | None]]:
    """Name, row, rate and losses of everything that loss and cost are known of."""
    ends = {0.0: "never", 1.0: "always"}
    for row in held.ledger.rows:
        if not held.of(row, "rates"):
            yield row, row, None, held.losses(row)
            continue
        if all(held.policy(row, "gate", rate) is None for rate in held.rates):
            yield row, row, None, held.policy(row, "as it is")  # a gate that aims at no rate, such as always
            continue
        timed = {one.rate for found in held.of(row, "speed").values() for one in found.decode}
        for rate in sorted({*held.rates, *(end for end in ends if end in timed)}):
            policy = ("gate", rate) if rate in held.rates else (ends[rate], None)
            yield f"{row} at {100 * rate:g} %", row, rate, held.policy(row, *policy)


def _cost(held: Results, row: str, rate: float | None) -> tuple[Cell | None, ...]:
    each = held.decode(row, rate)
    return (
        _mean((100 * one.fire for one in each), 1),
        _mean((1e6 * one.seconds for one in each), 0),
        _mean((one.bytes / 1e3 for one in each), 0),
        _mean((one.head_passes for one in each), 2),
    )


def recall(held: Results) -> Table:
    """How much of a task is remembered, and where gates fired: at the questions, and elsewhere."""
    lines = []
    for row in held.ledger.rows:
        found: list[Recall] = list(held.of(row, "recall").values())
        if not found:
            continue
        cells = (
            _right(found),
            _mean((100 * one.chance for one in found), 1),
            _mean((100 * block.questions for one in found for block in one.blocks), 1),
            _mean((100 * block.elsewhere for one in found for block in one.blocks), 1),
            Cell(found[0].state.fixed, digits=0),
            Cell(found[0].state.a_token, digits=0),
        )
        lines.append(TableRow(row, cells))
    columns = ("right, %", "by chance", "fires on questions, %", "elsewhere, %", "state", "state a token")
    said = "right: the best token at every token of an answer; state: numbers held by a row"
    remarks = (said, *chosen_on(held, "the task's valid stream, reported on its test stream"), *lacking(held))
    return Table(f"{held.study.title}: what is remembered", "model", columns, tuple(lines), notes=remarks)


def _right(found: Sequence[Recall]) -> Cell | None:
    """Right answers in percent, over seeds."""
    right = [(100 * one.token.mean, 100 * (one.token.se or 0.0)) for one in found if one.token.mean is not None]
    return Cell(statistics.mean(mean for mean, _ in right), _both(right), 1) if right else None


def reach(held: Results) -> Table:
    """How much is remembered of the task at other sizes."""
    asked = held.study.judge.reach
    assert asked is not None
    lines = []
    for row in held.ledger.rows:
        found: list[Reach] = list(held.of(row, "reach").values())
        if found:
            lines.append(TableRow(row, tuple(_right(each) for each in zip(*(one.sizes for one in found), strict=True))))
    columns = tuple(", ".join(f"{key} {value}" for key, value in changes.items()) for changes in asked.at)
    remarks = ("right answers in percent, of runs that have learned the task at its own size", *lacking(held))
    return Table(f"{held.study.title}: at other sizes", "model", columns, tuple(lines), notes=remarks)


def sweep(held: Results) -> Table:
    """Every learning rate that was tried, by the loss that training measured at its end."""
    best, lines = chosen(held.runs), []
    for row in held.ledger.rows:
        for lr in held.study.lr:
            losses = [one.valid for one in held.runs if one.planned.row == row and one.planned.lr == lr and one.valid is not None]
            spread = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None
            cell = Cell(statistics.mean(losses), spread, 4) if losses else None
            mark = " (shown)" if row in best and best[row] == lr else ""
            lines.append(TableRow(f"{row}, lr {lr:g}{mark}", (cell, Cell(len(losses), digits=0))))
    said = "loss on validation windows at the last step; the error is over seeds"
    return Table(f"{held.study.title}: learning rates", "run", ("loss", "seeds"), tuple(lines), notes=(said, *lacking(held)))


def notes(held: Results, kind: str) -> Iterator[str]:
    """How the numbers of a kind came about, and what is not there."""
    steps = sorted({run.steps for run in held.ledger.runs})
    by_row = [held.of(row, kind) for row in held.ledger.rows]
    seeds = [seed for seed in held.study.seeds if any(seed in found for found in by_row)]
    threads = "1 thread" if held.study.threads == 1 else f"{held.study.threads} threads"
    yield f"{'/'.join(f'{n:,}' for n in steps)} steps; seeds {', '.join(map(str, seeds)) or 'none yet'}; {threads} a run"
    found = [one for ones in by_row for one in ones.values()]
    if found:
        read = found[0].data
        yield f"losses: {read.windows} windows of {read.context:,} tokens of {read.source}, nats a token"
    several = max(map(len, by_row)) > 1
    yield from chosen_on(held, "windows of the same held-out split")
    yield "errors: of windows and of seeds together" if several else "errors: of windows alone, for there is one seed"
    yield from lacking(held)


def chosen_on(held: Results, text: str) -> Iterator[str]:
    """Where several learning rates were tried: the choice has seen what the numbers are of, or something beside it."""
    if held.study.lr:
        yield f"of each row the learning rate of the lowest validation loss, chosen on {text}"


def lacking(held: Results) -> Iterator[str]:
    yield from (f"missing: {words}" for words in held.missing())


MAKERS: dict[str, Callable[[Results], Table]] = {
    "models": models,
    "gates": gates,
    "value": value,
    "rates": rates,
    "choices": choices,
    "frontier": frontier,
    "recall": recall,
    "reach": reach,
    "sweep": sweep,
}
