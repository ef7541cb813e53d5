"""Traces as a page: the texts token by token, then entropy and the numbers of each."""

from __future__ import annotations

from collections.abc import Iterator

from amor.records.trace import Trace, Traces
from amor.study.figures.panel import Panel, PanelCurve
from amor.study.page import PageSection, draw, percents, render_page, strips
from amor.study.table import Cell, Table, TableRow

READING = (
    "Each box is a token. Its colour is the entropy after reading it: how unsure the model is of "
    "the token that follows, from 0 (sure) to 1 (every token as likely). A filled dot under it "
    "means that the block's attention ran there. Surprise belongs to the token that was predicted. "
    "Point at a token, or move with the arrow keys, for its numbers."
)


def trace_page(data: Traces) -> str:
    """The page of one or more traces."""
    traces = data.traces
    shown = PageSection("Token by token", notes=(READING,), strips=strips(traces))
    numbers = (numbers_section(trace) for trace in traces)
    count = sum(len(trace.tokens) for trace in traces)
    models = dict.fromkeys(trace.model for trace in traces if trace.model)
    texts = f" in {len(traces)} texts" if len(traces) > 1 else ""
    subtitle = "; ".join((*models, f"{count:,} tokens{texts}"))
    conclusion = [verdict(trace) for trace in traces]
    facts = tiles(traces[0]) if len(traces) == 1 else {}
    return render_page("Where attention ran", subtitle, conclusion, facts, (shown, *numbers))


def verdict(trace: Trace) -> str:
    """What attention did on one text, in a sentence."""
    as_is, closed = trace.loss.as_is, trace.loss.closed
    if as_is is None or closed is None:
        text = "One token, which nothing predicts"
    elif not trace.blocks:
        text = f"{as_is:.3f} nats per token; this model has no gated blocks"
    elif not any(trace.fire_rate):
        text = f"No gate fired: attention ran on none of the tokens, {as_is:.3f} nats each"
    else:
        effect = "lowered" if closed >= as_is else "raised"
        text = f"Attention ran on {percents(trace.fire_rate)} of the tokens and {effect} the loss "
        text += f"by {abs(closed - as_is):.3f} nats per token, "
        text += f"from {closed:.3f} with every gate closed"
    return f"{trace.title}: {text}." if trace.title else f"{text}."


def tiles(trace: Trace) -> dict[str, str]:
    """The numbers of one text."""
    loss = trace.loss
    losses = {"loss (nats per token)": loss.as_is}
    if trace.blocks:
        losses |= {"loss, gates closed": loss.closed, "loss, gates open": loss.open}
    shown = {name: f"{nll:.3f}" for name, nll in losses.items() if nll is not None}
    rates = {f"block {k} ran on": f"{rate:.0%}" for k, rate in enumerate(trace.fire_rate)}
    return {"tokens": f"{len(trace.tokens):,}"} | shown | rates


def numbers_section(trace: Trace) -> PageSection:
    """Entropy along the text, and means by class of token."""
    lines, y = list(curves(trace)), "entropy / log V"
    panel = Panel("Entropy after each token", y, lines, x="token", values=False)
    title = f"In numbers: {trace.title}" if trace.title else "In numbers"
    caption = "dashed: thresholds" if trace.gate == "entropy" else ""
    drawing = draw("panel", panel, panel.title, caption)
    return PageSection(title, tables=(class_table(trace),), figures=(drawing,))


def curves(trace: Trace) -> Iterator[PanelCurve]:
    """Entropy at every block (without blocks, of the output), and the thresholds it is compared
    with."""
    places = list(range(1, len(trace.tokens) + 1))
    if not trace.blocks:
        yield PanelCurve("output", places, [token.final_entropy for token in trace.tokens])
    for block in range(trace.blocks):
        entropy = [token.entropy[block] for token in trace.tokens]
        yield PanelCurve(f"block {block}", places, entropy, block)
        threshold = trace.thresholds[block]
        if trace.gate == "entropy" and threshold is not None:
            ends = [places[0], places[-1]]
            yield PanelCurve("_", ends, [threshold] * 2, block, "dashed")


def class_table(trace: Trace) -> Table:
    """Means by class of token."""
    each = range(trace.blocks)
    heads = [*(f"entropy {k}" for k in each), *(f"block {k} runs" for k in each)]
    rows = []
    for row in trace.summary:
        entropy = (Cell(value, digits=2) for value in row.entropy)
        surprise = None if row.surprise is None else Cell(row.surprise, digits=2)
        fires = (f"{rate:.0%}" for rate in row.fire_rate)
        rows.append(TableRow(row.name, (f"{row.count:,}", *entropy, *fires, surprise)))
    columns = ("tokens", *heads, "surprise (nats)")
    return Table("Means by class of token", "class", columns, tuple(rows))
