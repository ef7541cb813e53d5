"""What a study ends in: its tables as text, Markdown and LaTeX, its figures, and one page that
holds all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from amor.files import replace_file
from amor.measures.loss import losses
from amor.study import figures
from amor.study.page import Drawing, PageSection, json_details, render_page
from amor.study.results import Results
from amor.study.table import Table, printed
from amor.study.tables import make_tables

PAGE, TABLES = "index.html", {"text": "tables.txt", "markdown": "tables.md", "latex": "tables.tex"}
FORMATS = (".svg", ".png")


def write(results: Results) -> list[Path]:
    """Write every file, each as a whole; the page is the last of them."""
    folder, tables, files = results.folder, make_tables(results), []
    for form, name in TABLES.items():
        replace_file(folder / name, "\n\n".join(printed(table, form) for table in tables) + "\n")
        files.append(folder / name)
    drawn = {name: figures.draw(name, results) for name in results.study.figures}
    for name, drawing in drawn.items():
        files += [figures.save(drawing, folder / f"{name}{ending}") for ending in FORMATS]
    inline = tuple(Drawing(figures.inline(drawing), name) for name, drawing in drawn.items())
    replace_file(folder / PAGE, page(results, tables, inline))
    return [*files, folder / PAGE]


def page(results: Results, tables: list[Table], drawings: tuple[Drawing, ...]) -> str:
    """The page of a study: its conclusion, figures and tables."""
    measured = sum(bool(run.results) for runs in results.shown.values() for run in runs)
    facts = {"rows": len(results.ledger.rows), "runs": len(results.runs)}
    facts |= {"runs measured": measured, "seeds": len(results.study.seeds)}
    details = (json_details("study.json", results.ledger),)
    sections = [
        PageSection("Figures", figures=drawings),
        *(PageSection(table.title, tables=(table,)) for table in tables),
        PageSection("The study as it was run", details=details),
    ]
    tiles = {name: str(count) for name, count in facts.items()}
    words = list(conclusion(results))
    return render_page(results.ledger.name, results.study.title, words, tiles, sections)


def conclusion(results: Results) -> Iterator[str]:
    """Which row is best, and whether that is more than noise; then what is missing."""
    kinds = results.study.measurements()
    grids = {row: losses(results, row) for row in results.ledger.rows} if "loss" in kinds else {}
    known = {row: grid for row, grid in grids.items() if grid is not None}
    if known:
        first, *others = sorted(known, key=lambda row: known[row].mean)
        best = known[first]
        text = f"{first} has the lowest held-out loss, {best.mean:.3f} ± {best.error:.3f} nats"
        gaps = {row: best.ahead(known[row]) for row in others}
        near = [row for row, gap in gaps.items() if gap is None or not gap.clear]
        if others:
            text += f"; not clearly ahead of {', '.join(near[:3])}" if near else ", clearly"
        more = f" and {len(near) - 3} more" if len(near) > 3 else ""
        yield f"{text}{more}."
    if "recall" in kinds:
        right = {
            row: statistics.mean(one.token.mean or 0 for one in seeds)
            for row, seeds in results.by_row("recall").items()
        }
        if right:
            best_row = max(right, key=lambda row: right[row])
            yield f"{best_row} answers most questions right, {right[best_row]:.0%}."
    if lacking := results.missing():
        rows = len(results.ledger.rows)
        yield f"Not everything is measured yet: {len(lacking)} of {rows} rows lack runs."
