"""What a study ends in: its tables as text, Markdown and LaTeX, its figures, and one page that
holds all of them."""

from __future__ import annotations

from pathlib import Path

from amor.files import replace_file
from amor.study import figures
from amor.study.page import Drawing, PageSection, json_details, render_page
from amor.study.results import Results
from amor.study.table import Table, printed
from amor.study.tables import make_tables

PAGE, TABLES = "index.html", {"text": "tables.txt", "markdown": "tables.md", "latex": "tables.tex"}
FORMATS = (".svg", ".png")


def write(results: Results) -> list[Path]:
    """Every file, each written whole; the page is the last of them."""
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
    name, study = results.ledger.name, results.study
    measured = sum(bool(run.results) for runs in results.shown.values() for run in runs)
    facts = {"rows": len(results.ledger.rows), "runs": len(results.runs), "seeds": len(study.seeds)}
    sections = [PageSection(table.title, tables=(table,)) for table in tables]
    sections.append(PageSection("Figures", figures=drawings, size="one"))
    sections.append(
        PageSection(
            "The study as it was run", details=(json_details("study.json", results.ledger),)
        )
    )
    shown = {
        fact: str(count) for fact, count in {**facts, "runs that are judged": measured}.items()
    }
    return render_page(name, study.title, sections, shown)
