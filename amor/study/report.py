"""The report of a run: one HTML file made from the files of the run directory.

Read: config.json, machine.json, metrics.jsonl, events.jsonl and, where it is there, findings.json
(histograms, texts).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amor import typed
from amor.errors import AmorError
from amor.files import replace_file
from amor.records.run import mean_of, settled
from amor.run import Run
from amor.study import figures
from amor.study.figures.histogram import BlockScores
from amor.study.figures.panel import Panel, PanelCurve
from amor.study.page import Details, Drawing, PageSection, json_details, render_page
from amor.study.runs import measured
from amor.study.strip import marked_text, shade
from amor.study.table import Cell, Table, TableRow

FILE = "report.html"
SMOOTH = 0.04  # share of the run over which the training loss is averaged


class RunData:
    """Everything that the report shows, read once."""

    def __init__(self, run: Run):
        self.recipe, self.config = run.recipe(), run.read_config()
        self.machine = run.read_machine()
        self.steps, self.evals = measured(run)
        self.events = list(run.read_events())
        self.findings, self.recall = run.read_findings(), run.read_recall()
        self.folder = run.folder
        if self.findings and len(self.findings.blocks) != self.blocks:
            raise AmorError(
                f"{run.findings}: of {len(self.findings.blocks)} blocks, where {run.metrics} has "
                f"{self.blocks}"
            )

    @property
    def speed(self) -> list[float]:
        return [line.timing.tokens_per_second for line in self.steps]

    @property
    def blocks(self) -> int:
        return len(self.steps[-1].blocks)

    def curve(self, key: str) -> PanelCurve:
        """A number over training."""
        return _curve(key, [(line.step, getattr(line, key)) for line in self.steps])

    def of_block(self, index: int, key: str, name: str = "", style: str = "line") -> PanelCurve:
        """A number of one block over training."""
        pairs = [(line.step, getattr(line.blocks[index], key)) for line in self.steps]
        return _curve(name or f"block {index}", pairs, index, style)


def _curve(
    name: str, pairs: list[tuple[int, float | None]], block: int = 0, style: str = "line"
) -> PanelCurve:
    """Steps at which the number is not finite are left out."""
    kept = [(x, y) for x, y in pairs if y is not None]
    return PanelCurve(name, [x for x, _ in kept], [y for _, y in kept], block, style)


def write(run: Run) -> Path:
    """Write RUN/report.html."""
    path = run.folder / FILE
    replace_file(path, render(RunData(run)))
    return path


def render(data: RunData) -> str:
    sections = (
        PageSection("Learning", figures=drawings(learning(data)), size="few"),
        gates_section(data),
        held_out_section(data),
        texts_section(data),
        how_section(data),
    )
    model, last = data.recipe.model, data.steps[-1]
    what = (
        f"{model.name}, begun from {model.start}"
        if model.start
        else f"{model.name} at {model.scale}"
    )
    subtitle = f"{what}; {last.step:,} steps, {last.tokens:,} tokens"
    return render_page(
        data.recipe.name,
        subtitle,
        sections,
        facts(data),
        f"Made from {data.folder} by amor report.",
    )


def facts(data: RunData) -> dict[str, str]:
    """The numbers a reader looks for first."""
    last, losses = data.steps[-1], data.curve("loss").y[-20:]
    shown = {
        "loss of the last steps (train)": f"{statistics.mean(losses):.3f}"
        if losses
        else "not finite"
    }
    valid = data.evals[-1].valid if data.evals else None
    if valid and valid.nll is not None and valid.perplexity is not None:
        shown |= {
            "validation loss": f"{valid.nll:.3f}",
            "validation perplexity": f"{valid.perplexity:,.1f}",
        }
    if data.findings and data.findings.unigram and data.findings.unigram.perplexity is not None:
        shown["perplexity of token frequencies"] = f"{data.findings.unigram.perplexity:,.0f}"
    if data.recall and data.recall.token.mean is not None:
        shown |= {
            "right answers": f"{data.recall.token.mean:.1%}",
            "right by chance": f"{data.recall.chance:.1%}",
        }
    if data.blocks:
        shown["tokens that fire, all blocks"] = (
            f"{statistics.mean(b.fire for b in last.blocks):.1%}"
        )
    if data.findings and data.findings.attention:
        worth = data.findings.attention
        shown["nats per token that attention saves"] = (
            f"{worth.gate.saved:.3f} (by chance {worth.chance.saved:.3f}, everywhere "
            f"{worth.everywhere.saved:.3f})"
        )
    if data.findings:
        shown["parameters"] = f"{data.findings.parameters:,}"
    rate = statistics.median(data.speed)
    shown["tokens per second (median)"] = f"{rate:,.0f}"
    ceiling, work = data.machine.gemm_gflops, data.machine.flops_per_token
    if ceiling and work:
        shown["of the machine's ceiling"] = f"{rate * work / ceiling / 1e9:.0%}"
    seconds = sum(line.timing.seconds for line in data.steps)
    shown["time in steps"] = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    return shown


def drawings(panels: Sequence[Panel]) -> tuple[Drawing, ...]:
    """The panels that have something to draw."""
    kept = [panel for panel in panels if any(len(curve.x) for curve in panel.curves)]
    return tuple(
        Drawing(figures.inline(figures.draw("panel", panel)), panel.title, panel.caption)
        for panel in kept
    )


def learning(data: RunData) -> list[Panel]:
    train, norms = data.curve("loss"), data.curve("grad_norm")
    valid = _curve("validation", [(line.step, line.valid.nll) for line in data.evals], 1, "dots")
    loss = [
        PanelCurve("each step", train.x, train.y, 0, "thin"),
        PanelCurve("train", train.x, smooth(train.y)),
        valid,
    ]
    unigram = data.findings.unigram.nll if data.findings and data.findings.unigram else None
    level = None if unigram is None else (unigram, "token frequencies")
    speed = PanelCurve("tokens/s", [line.step for line in data.steps], data.speed)
    return [
        Panel("Loss", "nats per token", loss, level=level),
        Panel("Learning rate", "", [data.curve("lr")], zero=True),
        Panel("Gradient norm", "before clipping", [norms], log=min(norms.y, default=0) > 0),
        Panel("Tokens per second", "", [speed], zero=True),
    ]


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean over the last steps, as many as there are at the beginning."""
    width, total, out = max(1, round(len(values) * SMOOTH)), 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        out.append(total / min(index + 1, width))
    return out


def gates_section(data: RunData) -> PageSection:
    if not data.blocks:
        return PageSection("Gates over training")
    each = range(data.blocks)
    panels = [
        Panel(
            "Firing rate",
            "share of tokens",
            [data.of_block(k, "fire") for k in each],
            limits=(0.0, 1.0),
        ),
        Panel("Spread of scores", "sigma", [data.of_block(k, "sigma") for k in each], zero=True),
        Panel("How wide a block is open", "mean alpha", [data.of_block(k, "alpha") for k in each]),
        *(threshold_panel(data, k) for k in each),
    ]
    return PageSection("Gates over training", tables=(gate_table(data),), figures=drawings(panels))


def threshold_panel(data: RunData, index: int) -> Panel:
    """Median and threshold of a block's scores, and between which of them 80 % of the tokens
    lie."""
    curves = [
        data.of_block(index, "mu", "median μ", "dashed"),
        data.of_block(index, "tau", "threshold τ"),
    ]
    band = tuple(data.of_block(index, key, "scores, 10-90 %") for key in ("score_10", "score_90"))
    paired = bool(band[0].x) and list(band[0].x) == list(band[1].x)
    shown = [curve for curve in curves if curve.x] or [
        PanelCurve("scores, 10 %", band[0].x, band[0].y, index, "thin")
    ]
    return Panel(
        f"Block {index}: threshold",
        "entropy / log V",
        shown,
        band=(band[0], band[1]) if paired else None,
    )


def gate_table(data: RunData) -> Table:
    """The numbers of every gate at the end of training, and between which firing rates it stayed
    for 80 % of it."""
    held_out, last = data.findings.blocks if data.findings else (), settled(data.steps)
    rows = []
    for index in range(data.blocks):
        rates = sorted(line.blocks[index].fire for line in data.steps)
        low, high = rates[(len(rates) - 1) // 10], rates[(len(rates) - 1) * 9 // 10]
        numbers = (mean_of(last, index, key) for key in ("mu", "sigma", "tau", "alpha"))
        cells = (None if number is None else Cell(number, digits=3) for number in numbers)
        fires = statistics.mean(line.blocks[index].fire for line in last)
        valid = f"{held_out[index].fire:.1%}" if held_out else None
        rows.append(
            TableRow(str(index), (*cells, f"{fires:.1%}", f"{low:.1%} - {high:.1%}", valid))
        )
    columns = (
        "μ",
        "σ",
        "threshold τ",
        "mean α",
        "fires",
        "fires, 10-90 % of all steps",
        "fires on held-out text",
    )
    note = (
        f"μ, σ, τ, α and the firing rate are means of the last {len(last):,} steps, "
        f"{last[0].step:,} to {last[-1].step:,}."
    )
    return Table("Gates over training", "block", columns, tuple(rows), notes=(note,))


def held_out_section(data: RunData) -> PageSection:
    """Scores per block; a gate of another kind compares another score."""
    if not data.findings or not data.findings.blocks:
        return PageSection("Gates on held-out text")
    kind = next((text.gate for text in data.findings.texts), None)
    label = (
        "entropy / log V"
        if kind == "entropy"
        else f"score of the gate {kind}"
        if kind
        else "score of the gate"
    )
    shown = []
    for block, scores in enumerate(data.findings.blocks):
        threshold = "no threshold" if scores.threshold is None else f"τ {scores.threshold:.3f}"
        svg = figures.inline(figures.draw("histogram", BlockScores(block, scores, label)))
        shown.append(Drawing(svg, f"Block {block}: {scores.fire:.1%} fire", threshold))
    judged = data.findings.judged
    note = (
        f"The final model on {judged.tokens:,} tokens ({judged.split}). Right of the "
        "threshold τ attention runs."
    )
    return PageSection("Gates on held-out text", notes=(note,), figures=tuple(shown))


def texts_section(data: RunData) -> PageSection:
    texts = tuple(marked_text(text) for text in (data.findings.texts if data.findings else ()))
    if not texts or not data.blocks:
        return PageSection("Texts", texts=texts)
    note = (
        "A token is coloured by how many blocks fired on it: having read it the model was "
        "unsure, and attention ran."
    )
    blocks = range(data.blocks + 1)
    key = tuple(
        (f"{n} of {data.blocks}", shade([k < n for k in range(data.blocks)])) for n in blocks
    )
    return PageSection(
        "Texts",
        notes=(f"{note} Point at a token for its scores and thresholds.",),
        key=key,
        texts=texts,
    )


def how_section(data: RunData) -> PageSection:
    details = [json_details("Recipe", data.config)]
    details += [json_details("Model", data.findings.model)] if data.findings else []
    machine = {
        name: _listed(value)
        for name, value in typed.tree(data.machine).items()
        if name != "version"
    }
    rows = tuple(TableRow(name, (value,)) for name, value in machine.items())
    details += [Details("Machine", Table("Machine", "what", ("value",), rows))] if rows else []
    events = tuple(TableRow(event.time, (event.event, event.message)) for event in data.events)
    details += (
        [Details("Events", Table("Events", "time", ("event", "what happened"), events))]
        if events
        else []
    )
    return PageSection("How it was run", details=tuple(details))


def _listed(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple | list) else str(value)
