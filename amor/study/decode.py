"""The decode benchmark as a table: our tokens/s, firing rates and crossings beside the paper's."""

from __future__ import annotations

from collections.abc import Collection

from amor.presets import SCALES
from amor.records.bench import DecodeFile
from amor.study.paper import PaperDecode, paper_decode
from amor.study.table import Cell, Table, TableRow


def tables(file: DecodeFile) -> list[Table]:
    """Of what `amor bench decode --out FILE` wrote. The paper's were measured at 1.5B on an H100:
    other hardware."""
    paper = paper_decode()
    parts = {speeds: file.curves, crossings: file.crossings, firing: file.firing}
    return [make(file, paper) for make, measured in parts.items() if measured]


def speeds(file: DecodeFile, paper: PaperDecode) -> Table:
    """Tokens per second by context, with the paper's at 3K."""
    contexts = sorted({c.context for c in file.curves})
    rows = []
    for label, name in {c.label: c.name for c in file.curves}.items():
        ours = {c.context: c.tokens_per_second for c in file.curves if c.label == label}
        theirs = str(paper.throughput[name].decode) if name in paper.throughput else None
        cells = (Cell(ours[c]) if c in ours else None for c in contexts)
        rows.append(TableRow(label, (*cells, theirs)))
    columns = (*(f"{c:,}" for c in contexts), "paper, 1.5b on an H100, 3K")
    return Table(f"Decode at {file.scale}: tokens/s by context", "model", columns, tuple(rows))


def crossings(file: DecodeFile, paper: PaperDecode) -> Table:
    """The context from which a gated model is faster than another."""
    rows = []
    for one in file.crossings:
        same = file.scale == "440m" and one.gated == "amor-mamba2 f=0.4"
        theirs = paper.crossings.get(one.other) if same else None
        numbers = (one.measured, one.equal_bytes, one.our_formula, one.paper_formula, theirs)
        rows.append(TableRow(f"{one.gated} over {one.other}", tuple(map(_tokens, numbers))))
    formulas = ("our formula", "V / (2 (1 - f))")
    columns = ("measured", "equal bytes", *formulas, "paper, measured at f = 0.4")
    title = "The context from which a gated model is faster"
    return Table(title, "faster than", columns, tuple(rows))


def firing(file: DecodeFile, paper: PaperDecode) -> Table:
    """Rates of the model that was measured, and beside them those the paper has of its
    architecture, if any."""
    name = _architecture(file.model, paper.fire_rate)
    columns, rows = [f"fires, {file.model or 'ours'}"], []
    if name:
        columns.append(f"paper, {name} 1.5b")
    for one in file.firing:
        cells: list[Cell | str | None] = [Cell(one.rate, digits=3)]
        if name:
            at = f"T{one.temperature:g}/{one.prompt // 1024}K"
            theirs = paper.fire_rate[name].get(at)
            cells.append(None if theirs is None else str(theirs))
        rows.append(TableRow(f"{one.prompt:,}, T = {one.temperature:g}", tuple(cells)))
    title = "Firing rates while text is generated"
    return Table(title, "prompt, temperature", tuple(columns), tuple(rows))


def _architecture(model: str | None, known: Collection[str]) -> str | None:
    """The architecture of the paper that a model of this name is, at whatever scale:
    amor-mamba2-440m is amor-mamba2."""
    scales = ["", *(f"-{scale}" for scale in SCALES)]
    return next((name for name in known if model in [name + scale for scale in scales]), None)


def _tokens(value: float | None) -> str | None:
    return None if value is None else "from the first" if value == 0 else f"{value / 1024:.0f}K"
