"""Gate value accounting as tables and as a page: what amor/judge/value.py and
amor/judge/choosing.py value."""

from __future__ import annotations

import msgspec

from amor.records.value import Agreement, Choosing, Value
from amor.study import page
from amor.study.table import Cell, Table, TableRow
from amor.study.verdict import main_sentences, order_sentences

# heading, and the field of an Agreement
SHARES = (
    *(("fires", "fire_rate"), ("best hit", "best"), ("chance", "fire_rate")),
    *(("precision", "precision"), ("chance", "precision_by_chance"), ("recall", "recall")),
    *(("captured", "captured"), ("chance", "captured_by_chance")),
)

# policy -> label of its tile: nats per token saved over never firing
TILES = {
    "gate": "nats saved per token, gate",
    "random": "nats saved, tokens by chance",
    "always": "nats saved, all tokens",
    "oracle": "nats saved, best tokens",
}


def value_page(value: Value) -> str:
    """The sentences, the numbers a reader looks for first, the figure and the tables."""
    figure = page.draw("value", value, "Loss, gain and overlap")
    saved = {name: getattr(value.losses, name).saved for name in TILES}
    facts = {words: f"{saved[name]:+.4f}" for name, words in TILES.items()}
    drawn = page.PageSection("In one figure", notes=order_sentences(value), figures=(figure,))
    numbers = page.PageSection("In numbers", notes=value.notes, tables=tuple(tables(value)))
    title = f"What the gate of {value.model} is worth"
    return page.render_page(title, about(value), main_sentences(value), facts, (drawn, numbers))


def about(value: Value) -> str:
    """The text that the gate was judged on."""
    data = value.data
    cut = f"{data.windows} windows of {data.context:,}"
    return f"{data.tokens:,} tokens of {data.source}: {cut}; gate: {value.gate}"


def tables(value: Value) -> list[Table]:
    """The account in numbers, for pages and terminals."""
    return [losses(value), agreement(value), gains(value)]


def losses(value: Value) -> Table:
    """Loss, saving and firing rate of every policy."""
    rows = []
    for name, row in msgspec.structs.asdict(value.losses).items():
        nll, saved = Cell(row.nll, row.se, 4), f"{row.saved:+.4f}±{row.saved_se:.4f}"
        rows.append(TableRow(name.replace("_", ", "), (nll, saved, page.percents(row.fire_rate))))
    return Table("Loss by policy", "policy", ("nll", "saved over never", "fires on"), tuple(rows))


def agreement(value: Value) -> Table:
    """How far the gate's tokens are those that gain most."""
    heads, names = zip(*SHARES)
    rows = (
        TableRow(str(row.block), tuple(percent(row, name) for name in names))
        for row in value.agreement
    )
    return Table("The gate against the best tokens", "block", heads, tuple(rows))


def percent(row: Agreement, name: str) -> str | None:
    """A share of an Agreement in percent, with its error."""
    value, error = getattr(row, name), getattr(row, f"{name}_se", None)
    if value is None:
        return None
    return f"{100 * value:.0f}" + (f"±{100 * error:.0f} %" if error is not None else " %")


def gains(value: Value) -> Table:
    """How the gain of firing is distributed over tokens."""
    rows = []
    for row in value.gains:
        quantiles = (f"{q:+.3f}" for q in (row.quantiles.p1, row.quantiles.p50, row.quantiles.p99))
        rho = None if row.rank_correlation is None else f"{row.rank_correlation:+.2f}"
        mean = f"{row.mean:+.4f}±{row.se:.4f}"
        rows.append(TableRow(row.name, (mean, *quantiles, f"{100 * row.positive:.0f} %", rho)))
    columns = ("mean (nats)", "1 %", "median", "99 %", "helps", "rank corr.")
    return Table("Gain of firing", "of", columns, tuple(rows))


def curve(value: Value) -> Table:
    """Loss against firing rate; the error is that of the oracle's loss."""
    rows = []
    for point in value.curve:
        levels = (point.gate, point.random, point.oracle)
        losses = (None if level is None else Cell(level.nll, digits=4) for level in levels)
        cells = (f"{point.fire_rate:.3f}", *losses, Cell(point.oracle.se, digits=4))
        rows.append(TableRow(f"{point.aim:g}", cells))
    columns = ("fired on", "gate", "random", "oracle", "± se")
    return Table("Loss against firing rate", "asked for", columns, tuple(rows))


def choices(value: Choosing) -> list[Table]:
    """What other gates save in front of the same attention, and how much more than the paper's gate
    does."""

    def table(title: str, key: str) -> Table:
        columns = tuple(f"{rate:.0%}" for rate in value.rates)
        rows = []
        for choice in value.choices:
            cells = (Cell(level.saved, level.se, 4) for level in getattr(choice, key))
            rows.append(TableRow(choice.name, tuple(cells)))
        return Table(title, "fires on the tokens of the highest", columns, tuple(rows))

    own, always = (f"{level.saved:.4f}±{level.se:.4f}" for level in (value.own, value.always))
    saved = f"nats per token saved over never firing; as it is {own}, always {always}"
    return [table(saved, "levels"), table("more than the paper's gate", "over_paper")]
