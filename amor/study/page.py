"""Pages and JSON of what was found: one file each, with nothing to fetch."""

from __future__ import annotations

from html import escape
from pathlib import Path

import msgspec

from amor import typed
from amor.files import disk_errors, replace_file
from amor.records.trace import Traces
from amor.records.value import Agreement, Choosing, Value
from amor.study.verdict import sentences

HERE = Path(__file__).parent
SHARES = ("fire_rate", "best", "fire_rate", "precision", "precision_by_chance", "recall", "captured", "captured_by_chance")


def write_json(path: str | Path, found: Traces | Value | Choosing) -> Path:
    return put(path, typed.line(found))


def write(path: str | Path, found: Traces | Value) -> Path:
    return put(path, trace_page(found) if isinstance(found, Traces) else value_page(found))


def put(path: str | Path, text: str) -> Path:
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    return path


def trace_page(found: Traces) -> str:
    """Traces with details under the pointer: the data in the page, drawn there."""
    held = typed.line(found).strip().replace("<", "\\u003c")  # no text can end the script
    return (HERE / "trace.html").read_text(encoding="utf-8").replace("{{data}}", held)


def value_page(found: Value) -> str:
    """Gate value accounting: the figure, the sentences and the tables."""
    from amor.study import figures

    parts = {
        "{{title}}": escape(f"What the gate of {found.model} is worth"),
        "{{data}}": escape(about(found)),
        "{{verdict}}": "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(found)),
        "{{notes}}": "".join(f"<p>{escape(note)}</p>" for note in found.notes),
        "{{figure}}": figures.inline(figures.draw("value", found)),
        "{{tables}}": "".join(html_table(title, rows) for title, rows in tables(found).items()),
    }
    text = (HERE / "value.html").read_text(encoding="utf-8")
    for place, put_in in parts.items():
        text = text.replace(place, put_in)
    return text


def about(found: Value) -> str:
    data = found.data
    cut = f"{data.windows} windows of {data.context:,}"
    return f"{data.tokens:,} tokens of {data.source}: {cut}; gate: {found.gate}"


def tables(found: Value) -> dict[str, list[list[str]]]:
    """Title -> rows of text, the first one the heads: for pages and terminals."""
    return {"Loss by policy": losses(found), "The gate against the best tokens": agreement(found), "Gain of firing": gains(found)}


def losses(found: Value) -> list[list[str]]:
    rows = [["policy", "nll", "± se", "saved over never", "± se", "fires on"]]
    for name, row in msgspec.structs.asdict(found.losses).items():
        rates = " / ".join(f"{100 * rate:.0f} %" for rate in row.fire_rate)
        saved = [f"{row.saved:+.4f}", f"{row.saved_se:.4f}"]
        rows.append([name.replace("_", ", "), f"{row.nll:.4f}", f"{row.se:.4f}", *saved, rates])
    return rows


def agreement(found: Value) -> list[list[str]]:
    rows = [["block", "fires", "best hit", "chance", "precision", "chance", "recall", "captured", "chance"]]
    for row in found.agreement:
        rows.append([str(row.block), *(percent(row, name) for name in SHARES)])
    return rows


def percent(row: Agreement, name: str) -> str:
    value, error = getattr(row, name), getattr(row, f"{name}_se", None)
    if value is None:
        return "-"
    return f"{100 * value:.0f}" + (f"±{100 * error:.0f} %" if error is not None else " %")


def gains(found: Value) -> list[list[str]]:
    rows = [["of", "mean (nats)", "± se", "1 %", "median", "99 %", "helps", "rank corr."]]
    for row in found.gains:
        spread = [f"{q:+.3f}" for q in (row.quantiles.p1, row.quantiles.p50, row.quantiles.p99)]
        rho = "-" if row.rank_correlation is None else f"{row.rank_correlation:+.2f}"
        rows.append([row.name, f"{row.mean:+.4f}", f"{row.se:.4f}", *spread, f"{100 * row.positive:.0f} %", rho])
    return rows


def html_table(title: str, rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<h2>{escape(title)}</h2><table>{line(rows[0], 'th')}{''.join(line(row, 'td') for row in rows[1:])}</table>"
