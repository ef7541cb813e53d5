"""The report of a run: one HTML file made from the files of the run directory.

Read: config.json, machine.json, metrics.jsonl, events.jsonl and, where it is there, findings.json (histograms, texts).
"""

import statistics
from collections.abc import Sequence
from html import escape
from itertools import chain
from pathlib import Path

from amor import typed
from amor.errors import AmorError
from amor.files import replace_file
from amor.records.run import mean_of, settled
from amor.run import Run
from amor.study import strip
from amor.study.charts import Band, Chart, Line, bar_chart, line_chart
from amor.study.html import folded, page, section, side_by_side, table, tiles
from amor.study.runs import measured

FILE = "report.html"
SMOOTH = 0.04  # share of the run over which the training loss is averaged


class Story:
    """Everything the report tells, read once."""

    def __init__(self, run: Run):
        self.recipe, self.config = run.recipe(), run.read_config()
        self.machine = run.read_machine()
        self.steps, self.evals = measured(run)
        self.events = list(run.read_events())
        self.found, self.recall = run.read_findings(), run.read_recall()
        self.folder = run.folder
        if self.found and len(self.found.blocks) != self.blocks:
            raise AmorError(f"{run.findings}: of {len(self.found.blocks)} blocks, where {run.metrics} has {self.blocks}")

    def series(self, key: str) -> Line:
        """A number over training; steps at which it has none (not finite) are left out."""
        return _line(key, [(line.step, getattr(line, key)) for line in self.steps], 0)

    @property
    def speed(self) -> list[float]:
        return [line.timing.tokens_per_second for line in self.steps]

    @property
    def blocks(self) -> int:
        return len(self.steps[-1].blocks)

    def of_block(self, index: int, *keys: str) -> list[Line]:
        """Numbers of a block over training; steps at which one of them has none (not finite) are left out of all."""
        rows = [(line.step, *(getattr(line.blocks[index], key) for key in keys)) for line in self.steps]
        kept = [row for row in rows if None not in row]
        x = [row[0] for row in kept]
        return [Line(f"block {index}", x, [row[1 + k] for row in kept], index % 6) for k in range(len(keys))]


def _line(name: str, pairs: list[tuple[int, float | None]], colour: int, style: str = "line") -> Line:
    kept = [(x, y) for x, y in pairs if y is not None]
    return Line(name, [x for x, _ in kept], [y for _, y in kept], colour, style)


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
    return page(f"{story.recipe.name} - amor", "\n".join(parts))


def heading(story: Story) -> str:
    model, last = story.recipe.model, story.steps[-1]
    done = f"{last.step:,} steps, {last.tokens:,} tokens"
    what = f"{model.name}, begun from {model.start}" if model.start else f"{model.name} at {model.scale}"
    return f'<h1>{escape(story.recipe.name)}</h1><p class="soft">{escape(what)}; {done}</p>'


def facts(story: Story) -> dict[str, str]:
    """The numbers a reader looks for first."""
    last, losses = story.steps[-1], story.series("loss").y[-20:]
    found = {"loss of the last steps (train)": f"{statistics.mean(losses):.3f}" if losses else "not finite"}
    valid = story.evals[-1].valid if story.evals else None
    if valid and valid.nll is not None and valid.perplexity is not None:
        found |= {"validation loss": f"{valid.nll:.3f}", "validation perplexity": f"{valid.perplexity:,.1f}"}
    if story.found and story.found.unigram and story.found.unigram.perplexity is not None:
        found["perplexity of token frequencies"] = f"{story.found.unigram.perplexity:,.0f}"
    if story.recall and story.recall.token.mean is not None:
        found |= {"right answers": f"{story.recall.token.mean:.1%}", "right by chance": f"{story.recall.chance:.1%}"}
    if story.blocks:
        found["tokens that fire, all blocks"] = f"{statistics.mean(b.fire for b in last.blocks):.1%}"
    if story.found and story.found.attention:
        worth = story.found.attention
        found["nats a token that attention saves"] = (
            f"{worth.gate.saved:.3f} (by chance {worth.chance.saved:.3f}, everywhere {worth.everywhere.saved:.3f})"
        )
    if story.found:
        found["parameters"] = f"{story.found.parameters:,}"
    rate = statistics.median(story.speed)
    found["tokens a second (median)"] = f"{rate:,.0f}"
    ceiling, work = story.machine.gemm_gflops, story.machine.flops_per_token
    if ceiling and work:
        found["of the machine's ceiling"] = f"{rate * work / ceiling / 1e9:.0%}"
    seconds = sum(line.timing.seconds for line in story.steps)
    found["time in steps"] = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    return found


def learning(story: Story) -> list[str]:
    train, norms = story.series("loss"), story.series("grad_norm")
    valid = _line("validation", [(line.step, line.valid.nll) for line in story.evals], 1, "dots")
    loss = [Line("each step", train.x, train.y, 0, "thin"), Line("train", train.x, smooth(train.y), 0), valid]
    unigram = story.found.unigram.nll if story.found and story.found.unigram else None
    marks = [(unigram, "token frequencies")] if unigram is not None else []
    speed = Line("tokens/s", [line.step for line in story.steps], story.speed)
    return [
        line_chart(Chart("Loss", "nats a token", lines=loss, marks=marks)),
        line_chart(Chart("Learning rate", lines=[story.series("lr")], zero=True)),
        line_chart(Chart("Gradient norm", "before clipping", lines=[norms], log=min(norms.y, default=0) > 0)),
        line_chart(Chart("Tokens a second", lines=[speed], zero=True)),
    ]


def smooth(values: Sequence[float]) -> list[float]:
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
        line_chart(
            Chart(
                "Firing rate", "share of tokens", lines=[*chain(*(story.of_block(k, "fire") for k in each))], y_range=(0.0, 1.0)
            )
        ),
        line_chart(Chart("Spread of scores", "sigma", lines=[*chain(*(story.of_block(k, "sigma") for k in each))], zero=True)),
        line_chart(Chart("How wide a block is open", "mean alpha", lines=[*chain(*(story.of_block(k, "alpha") for k in each))])),
        *(line_chart(threshold_chart(story, k)) for k in each),
    ]
    return [gate_table(story), side_by_side(charts)]


def threshold_chart(story: Story, index: int) -> Chart:
    low, high = story.of_block(index, "score_10", "score_90")
    colour = index % 6
    (mu,), (tau,) = story.of_block(index, "mu"), story.of_block(index, "tau")
    lines = [Line("median μ", mu.x, mu.y, colour, "dashed"), Line("threshold τ", tau.x, tau.y, colour)]
    return Chart(
        f"Block {index}: threshold",
        "entropy / log V",
        lines=[line for line in lines if line.x],
        bands=[Band("scores, 10-90 %", low.x, low.y, high.y, colour)],
    )


def gate_table(story: Story) -> str:
    """The numbers of every gate at the end of training, and between which firing rates it stayed for 80 % of it."""
    held, last = story.found.blocks if story.found else (), settled(story.steps)
    head = ["block", "μ", "σ", "threshold τ", "mean α", "fires", "fires, 10-90 % of all steps", "fires on held-out text"]
    rows = []
    for index in range(story.blocks):
        rates = sorted(line.blocks[index].fire for line in story.steps)
        low, high = rates[(len(rates) - 1) // 10], rates[(len(rates) - 1) * 9 // 10]
        cells = [mean_of(last, index, key) for key in ("mu", "sigma", "tau", "alpha")]
        fires = statistics.mean(line.blocks[index].fire for line in last)
        row = [str(index), *("-" if c is None else f"{c:.3f}" for c in cells), f"{fires:.1%}", f"{low:.1%} - {high:.1%}"]
        rows.append([*row, f"{held[index].fire:.1%}" if held else "-"])
    words = f"μ, σ, τ, α and the firing rate are means of the last {len(last):,} steps, {last[0].step:,} to {last[-1].step:,}."
    return f'<p class="note">{words}</p>{table(head, rows)}'


def histograms(story: Story) -> list[str]:
    """Scores a block; a gate of another kind compares another score."""
    if not story.found or not story.found.blocks:
        return []
    kind = next((text.gate for text in story.found.texts), None)
    label = "entropy / log V" if kind == "entropy" else f"score of the gate {kind}" if kind else "score of the gate"
    drawn = [
        bar_chart(f"Block {k}: {b.fire:.1%} fire", b.low, b.high, b.shares, label, b.threshold, k % 6)
        for k, b in enumerate(story.found.blocks)
    ]
    judged = story.found.judged
    words = f"The final model on {judged.tokens:,} tokens ({judged.split}). Right of the threshold τ attention runs."
    return [f'<p class="note">{escape(words)}</p>', side_by_side(drawn)]


def texts(story: Story) -> list[str]:
    shown = [card(text.title, strip.as_html(text)) for text in (story.found.texts if story.found else ())]
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
    events = [[e.time, e.event, e.message] for e in story.events]
    machine = {name: value for name, value in typed.tree(story.machine).items() if name != "version"}
    rows = [[name, ", ".join(value) if isinstance(value, tuple | list) else str(value)] for name, value in machine.items()]
    return [
        folded("Recipe", story.config),
        folded("Model", story.found.model) if story.found else "",
        f"<details><summary>Machine</summary>{table(['what', 'value'], rows)}</details>" if rows else "",
        f"<details><summary>Events</summary>{table(['time', 'event', 'what happened'], events)}</details>" if events else "",
        f'<p class="soft">Made from {escape(str(story.folder))} by amor report.</p>',
    ]
