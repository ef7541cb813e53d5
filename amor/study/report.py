"""The report of a run: one HTML file made from the files of the run directory.

Read: config.json, machine.json, metrics.jsonl, events.jsonl and, where it is there, findings.json (histograms, texts).
"""

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any

from amor.errors import AmorError
from amor.files import replace_file
from amor.run import Run
from amor.study import strip
from amor.study.charts import Band, Chart, Line, bar_chart, line_chart
from amor.study.html import folded, page, section, side_by_side, table, tiles

FILE = "report.html"
SMOOTH = 0.04  # share of the run over which the training loss is averaged


class Story:
    """Everything the report tells, read once."""

    def __init__(self, run: Run):
        self.recipe = run.read_config()
        self.machine = _json(run.machine) or {}
        lines = list(run.lines())
        self.steps = [line for line in lines if "loss" in line]
        self.evals = [line for line in lines if "valid" in line]
        self.events = [json.loads(line) for line in run.events.read_text().splitlines()] if run.events.is_file() else []
        self.found: dict[str, Any] = _json(run.findings) or {}
        self.folder = run.folder
        if not self.steps:
            raise AmorError(f"{run.folder} holds no metrics yet; nothing has been trained in it")

    @property
    def x(self) -> list[float]:
        return [line["step"] for line in self.steps]

    def series(self, key: str) -> list[float]:
        return [line[key] for line in self.steps]

    @property
    def blocks(self) -> int:
        return len(self.steps[-1].get("blocks", ()))

    def of_block(self, index: int, key: str) -> Line:
        """A number of a block over training; steps at which it has none (not finite) are left out."""
        pairs = [(line["step"], line["blocks"][index].get(key)) for line in self.steps]
        kept = [(step, value) for step, value in pairs if value is not None]
        return Line(f"block {index}", [s for s, _ in kept], [v for _, v in kept], index % 6)

    @property
    def unigram(self) -> dict[str, float] | None:
        return self.found.get("unigram")


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def write(run: Run) -> Path:
    """Write RUN/report.html."""
    path = run.folder / FILE
    replace_file(path, render(Story(run)))
    return path


def render(story: Story) -> str:
    parts = [
        heading(story),
        tiles(facts(story)),
        section("Learning", side_by_side(learning(story), "few")),
        section("Gates over training", *gates(story)),
        section("Gates on held-out text", *histograms(story)),
        section("Texts", *texts(story)),
        section("How it was run", *how(story)),
    ]
    return page(f"{story.recipe['name']} - amor", "\n".join(parts))


def heading(story: Story) -> str:
    model = story.recipe["model"]
    last = story.steps[-1]
    done = f"{last['step']:,} steps, {last['tokens']:,} tokens"
    return (
        f'<h1>{escape(story.recipe["name"])}</h1><p class="soft">{escape(model["name"])} at {escape(model["scale"])}; {done}</p>'
    )


def facts(story: Story) -> dict[str, str]:
    """The numbers a reader looks for first."""
    last, timing = story.steps[-1], [line["timing"] for line in story.steps]
    found = {"loss of the last steps (train)": f"{statistics.mean(story.series('loss')[-20:]):.3f}"}
    if story.evals and story.evals[-1]["valid"]["nll"] is not None:
        valid = story.evals[-1]["valid"]
        found |= {"validation loss": f"{valid['nll']:.3f}", "validation perplexity": f"{valid['perplexity']:,.1f}"}
    if story.unigram:
        found["perplexity of token frequencies"] = f"{story.unigram['perplexity']:,.0f}"
    if story.blocks:
        found["tokens that fire, all blocks"] = f"{statistics.mean(b['fire'] for b in last['blocks']):.1%}"
    if "parameters" in story.found:
        found["parameters"] = f"{story.found['parameters']:,}"
    rate = statistics.median(t["tokens_per_second"] for t in timing)
    found["tokens a second (median)"] = f"{rate:,.0f}"
    ceiling, work = story.machine.get("gemm_gflops"), story.machine.get("flops_per_token")
    if ceiling and work:
        found["of the machine's ceiling"] = f"{rate * work / ceiling / 1e9:.0%}"
    seconds = sum(t["seconds"] for t in timing)
    found["time in steps"] = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    return found


def learning(story: Story) -> list[str]:
    x, losses = story.x, story.series("loss")
    judged = [(line["step"], line["valid"]["nll"]) for line in story.evals if line["valid"]["nll"] is not None]
    loss = [Line("each step", x, losses, 0, "thin"), Line("train", x, smooth(losses), 0)]
    loss += [Line("validation", [s for s, _ in judged], [v for _, v in judged], 1, "dots")] if judged else []
    marks = [(story.unigram["nll"], "token frequencies")] if story.unigram else []
    speed = [line["timing"]["tokens_per_second"] for line in story.steps]
    norms = story.series("grad_norm")
    return [
        line_chart(Chart("Loss", "nats a token", lines=loss, marks=marks)),
        line_chart(Chart("Learning rate", lines=[Line("lr", x, story.series("lr"))], zero=True)),
        line_chart(Chart("Gradient norm", "before clipping", lines=[Line("norm", x, norms)], log=min(norms) > 0)),
        line_chart(Chart("Tokens a second", lines=[Line("tokens/s", x, speed)], zero=True)),
    ]


def smooth(values: list[float]) -> list[float]:
    """A running mean over the last steps, as many as there are at the beginning."""
    width, total, out = max(1, round(len(values) * SMOOTH)), 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        out.append(total / min(index + 1, width))
    return out


def gates(story: Story) -> list[str]:
    if not story.blocks:
        return []
    each = range(story.blocks)
    charts = [
        line_chart(Chart("Firing rate", "share of tokens", lines=[story.of_block(k, "fire") for k in each], y_range=(0.0, 1.0))),
        line_chart(Chart("Spread of scores", "sigma", lines=[story.of_block(k, "sigma") for k in each], zero=True)),
        line_chart(Chart("How wide a block is open", "mean alpha", lines=[story.of_block(k, "alpha") for k in each])),
        *(line_chart(threshold_chart(story, k)) for k in each),
    ]
    return [gate_table(story), side_by_side(charts)]


def threshold_chart(story: Story, index: int) -> Chart:
    low, high = story.of_block(index, "score_10"), story.of_block(index, "score_90")
    colour = index % 6
    mu, tau = story.of_block(index, "mu"), story.of_block(index, "tau")
    lines = [Line("median μ", mu.x, mu.y, colour, "dashed"), Line("threshold τ", tau.x, tau.y, colour)]
    return Chart(
        f"Block {index}: threshold",
        "entropy / log V",
        lines=[line for line in lines if line.x],
        bands=[Band("scores, 10-90 %", low.x, low.y, high.y, colour)],
    )


def gate_table(story: Story) -> str:
    """The last numbers of every gate, and between which firing rates it stayed for 80 % of training."""
    held = story.found.get("blocks", [])
    head = ["block", "μ", "σ", "threshold τ", "mean α", "fires (last step)", "fires, 10-90 % of steps", "fires on held-out text"]
    rows = []
    for index, block in enumerate(story.steps[-1]["blocks"]):
        rates = sorted(line["blocks"][index]["fire"] for line in story.steps)
        low, high = rates[(len(rates) - 1) // 10], rates[(len(rates) - 1) * 9 // 10]
        cells = [block.get(key) for key in ("mu", "sigma", "tau", "alpha")]
        row = [str(index), *("-" if c is None else f"{c:.3f}" for c in cells), f"{block['fire']:.1%}", f"{low:.1%} - {high:.1%}"]
        rows.append([*row, f"{held[index]['fire']:.1%}" if held else "-"])
    return table(head, rows)


def histograms(story: Story) -> list[str]:
    """Scores a block; a gate of another kind compares another score."""
    held = story.found.get("blocks", [])
    if not held:
        return []
    kind = story.found["model"]["blocks"]["gate"]
    label = "entropy / log V" if kind == "entropy" else f"score of the gate {kind}"
    drawn = [
        bar_chart(f"Block {k}: {b['fire']:.1%} fire", b["low"], b["high"], b["shares"], label, b["threshold"], k % 6)
        for k, b in enumerate(held)
    ]
    judged = story.found["judged"]
    words = f"The final model on {judged['tokens']:,} tokens ({judged['split']}). Right of the threshold τ attention runs."
    return [f'<p class="note">{escape(words)}</p>', side_by_side(drawn)]


def texts(story: Story) -> list[str]:
    shown = [card(text["title"], strip.as_html(text, text.get("given", 0))) for text in story.found.get("texts", [])]
    return [key(story.blocks), *shown] if shown and story.blocks else shown


def key(blocks: int) -> str:
    """What the colours mean."""
    shades = [(f"{n} of {blocks}", strip.shade([k < n for k in range(blocks)])) for n in range(blocks + 1)]
    words = "".join(f'<span class="h{shade}">{name}</span>' for name, shade in shades)
    note = "A token is coloured by how many blocks fired on it: having read it the model was unsure, and attention ran."
    return f'<p class="note">{note} Point at a token for its scores and thresholds.</p><p class="key">blocks fired: {words}</p>'


def card(title: str, inside: str) -> str:
    return f'<div class="card"><small>{escape(title)}</small>{inside}</div>'


def how(story: Story) -> list[str]:
    events = [[e.get("time", ""), e["event"], e.get("message", "")] for e in story.events]
    rows = [
        [name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)] for name, value in story.machine.items()
    ]
    return [
        folded("Recipe", story.recipe),
        folded("Model", story.found["model"]) if "model" in story.found else "",
        f"<details><summary>Machine</summary>{table(['what', 'value'], rows)}</details>" if rows else "",
        f"<details><summary>Events</summary>{table(['time', 'event', 'what happened'], events)}</details>" if events else "",
        f'<p class="soft">Made from {escape(str(story.folder))} by amor report.</p>',
    ]
