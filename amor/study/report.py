"""The report of a run: one HTML file made from the files of the run directory.

Read: config.json, machine.json, metrics.jsonl, events.jsonl and, where they are there,
findings.json (histograms, texts), recall.json (of a run that learned a task) and
recall/by_policy.json (of `amor demo`, whose second model learns a task).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amor import typed
from amor.errors import AmorError
from amor.files import replace_file
from amor.records.recall import RecallByPolicy
from amor.records.run import mean_of, settled
from amor.run import Run
from amor.study import figures
from amor.study.figures.histogram import BlockScores
from amor.study.figures.panel import Panel, PanelCurve
from amor.study.page import (
    Details,
    Drawing,
    PageSection,
    json_details,
    percents,
    put,
    render_page,
    strips,
)
from amor.study.runs import measured, running_mean
from amor.study.table import Cell, Table, TableRow
from amor.study.verdict import FEW

FILE = "report.html"
BY_POLICY = "recall/by_policy.json"
ETA = 0.01  # of gates whose options do not name it: the paper's
FOLLOWED = 3.0  # a run of more than FOLLOWED / eta steps is long enough for its thresholds
SMOOTH = 0.04  # share of the run over which the training loss is averaged
# policy -> what it is called beside a share of right answers
POLICIES = {
    "gate": "where the gate chose",
    "chance": "on as many tokens by chance",
    "everywhere": "everywhere",
    "never": "nowhere",
}


class RunData:
    """Everything that the report shows, read once."""

    def __init__(self, run: Run):
        self.recipe, self.config = run.recipe(), run.read_config()
        self.machine = run.read_machine()
        self.steps, self.evals = measured(run)
        self.events = list(run.read_events())
        self.findings, self.recall = run.read_findings(), run.read_recall()
        by_policy = run.folder / BY_POLICY
        self.by_policy = typed.read(RecallByPolicy, by_policy) if by_policy.is_file() else None
        self.folder = run.folder
        if self.findings and len(self.findings.blocks) != self.blocks:
            raise AmorError(
                f"{run.findings}: of {len(self.findings.blocks)} blocks, where {run.metrics} has "
                f"{self.blocks}"
            )

    @property
    def speed(self) -> list[float]:
        """Tokens per second of every step."""
        return [line.timing.tokens_per_second for line in self.steps]

    @property
    def blocks(self) -> int:
        """How many gated blocks the model has."""
        return len(self.steps[-1].blocks)

    @property
    def fire(self) -> float:
        """Firing rate of the last step, mean of all blocks."""
        return statistics.mean(block.fire for block in self.steps[-1].blocks)

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


def sentences(run: Run) -> list[str]:
    """What the run came to, as its report begins."""
    return list(conclusion(RunData(run)))


def add_recall(run: Run, by_policy: Mapping[str, Any]) -> Path:
    """Keep what the demo's second model recalls, by policy (the fields of RecallByPolicy), and draw
    the report again."""
    record = typed.convert(RecallByPolicy, dict(by_policy), "recall by policy")
    put(run.folder / BY_POLICY, typed.text(record))
    return write(run)


def render(data: RunData) -> str:
    """The page."""
    model, last = data.recipe.model, data.steps[-1]
    start = f", begun from {model.start}" if model.start else f" at {model.scale}"
    subtitle = f"{model.name}{start}; {last.step:,} steps, {last.tokens:,} tokens"
    sections = (
        recall_section(data),
        PageSection("Learning", figures=drawings(learning(data))),
        gates_section(data),
        held_out_section(data),
        texts_section(data),
        how_section(data),
    )
    footer = f"Made from {data.folder} by amor report."
    words = tuple(conclusion(data))
    return render_page(data.recipe.name, subtitle, words, facts(data), sections, footer)


def conclusion(data: RunData) -> Iterator[str]:
    """What the run came to, in sentences."""
    valid = data.evals[-1].valid if data.evals else None
    findings = data.findings
    if valid and valid.nll is not None and valid.perplexity is not None:
        text = f"Held-out text has a perplexity of {valid.perplexity:,.1f}"
        if findings and findings.unigram and findings.unigram.perplexity is not None:
            text += f"; guessing by token frequencies has {findings.unigram.perplexity:,.0f}"
        yield f"{text}."
    else:
        losses = data.curve("loss").y[-20:]
        loss = f"{statistics.mean(losses):.3f}" if losses else "not finite"
        yield f"The training loss of the last steps is {loss}; held-out text was not evaluated."
    if findings and (worth := findings.attention):
        gate, chance = worth.gate, worth.chance
        clear = gate.saved > FEW * gate.se
        fires = percents(block.fire for block in findings.blocks)
        saves = (
            f"saves {gate.saved:.3f} ± {gate.se:.3f} nats per token" if clear else "saves nothing"
        )
        than = "more than" if gate.saved > chance.saved + FEW * gate.se else "about as much as"
        more = f", {than} on as many tokens chosen by chance" if clear else " that can be measured"
        if any(block.fire for block in findings.blocks):
            yield f"Attention runs on {fires} of held-out tokens and {saves}{more}."
        else:
            yield f"Attention runs on none of the held-out tokens{why_none_fires(data)}."
    elif data.blocks:
        yield f"Attention ran on {data.fire:.0%} of the tokens of the last step, mean of blocks."
    if data.recall and data.recall.token.mean is not None:
        own, guessing = data.recall.token.mean, data.recall.chance
        yield f"Of its task it answers {own:.0%} right, where guessing has {guessing:.0%}."
    if by := data.by_policy:
        right = {name: getattr(by, name).mean or 0.0 for name in POLICIES}
        yield (
            f"On a task that needs attention {right['gate']:.0%} of the answers are right with "
            f"attention on {by.rate:.0%} of the tokens, where the gate chose; on as many by chance "
            f"{right['chance']:.0%}, everywhere {right['everywhere']:.0%}, nowhere "
            f"{right['never']:.0%}."
        )


def why_none_fires(data: RunData) -> str:
    """Of a run so short that the thresholds are still those of its first steps, else nothing.

    The entropy of a new model falls faster than an EMA of weight eta follows, about 1 / eta steps.
    """
    blocks = data.findings.model.get("blocks", {}) if data.findings else {}
    eta = blocks.get("gate_options", {}).get("eta", ETA)
    steps, adaptive = data.steps[-1].step, any(block.mu for block in data.steps[-1].blocks)
    if not adaptive or not eta or steps > FOLLOWED / eta:
        return ""
    return (
        f": the thresholds are averages over about {1 / eta:,.0f} steps and do not follow the "
        f"falling entropy in {steps:,}; train longer, or set blocks.gate_options.eta"
    )


def facts(data: RunData) -> dict[str, str]:
    """The numbers a reader looks for first: label -> one number."""
    losses, findings = data.curve("loss").y[-20:], data.findings
    shown = {
        "training loss, last steps (nats)": f"{statistics.mean(losses):.3f}"
        if losses
        else "not finite"
    }
    valid = data.evals[-1].valid if data.evals else None
    if valid and valid.nll is not None and valid.perplexity is not None:
        shown["validation loss (nats)"] = f"{valid.nll:.3f}"
        shown["validation perplexity"] = f"{valid.perplexity:,.1f}"
    if findings and findings.unigram and findings.unigram.perplexity is not None:
        shown["perplexity of token frequencies"] = f"{findings.unigram.perplexity:,.0f}"
    if data.recall and data.recall.token.mean is not None:
        shown["right answers"] = f"{data.recall.token.mean:.1%}"
        shown["right by guessing"] = f"{data.recall.chance:.1%}"
    if data.blocks:
        shown["tokens that fire, all blocks"] = f"{data.fire:.1%}"
    if findings and (worth := findings.attention):
        shown["nats saved per token, gate"] = f"{worth.gate.saved:.3f}"
        shown["nats saved, tokens by chance"] = f"{worth.chance.saved:.3f}"
        shown["nats saved, all tokens"] = f"{worth.everywhere.saved:.3f}"
    if findings:
        shown["parameters"] = f"{findings.parameters:,}"
    rate = statistics.median(data.speed)
    shown["tokens per second, median"] = f"{rate:,.0f}"
    ceiling, work = data.machine.gemm_gflops, data.machine.flops_per_token
    # above 1 the machine was busy while the ceiling was measured
    if ceiling and work and (share := rate * work / ceiling / 1e9) <= 1:
        shown["of the machine's ceiling"] = f"{share:.0%}"
    seconds = sum(line.timing.seconds for line in data.steps)
    shown["time in steps"] = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"
    return shown


def recall_section(data: RunData) -> PageSection:
    """Right answers of the demo's second model, by where attention ran."""
    title = "Where attention is needed: recall"
    if not (by := data.by_policy):
        return PageSection(title)
    rows = []
    for name, words in POLICIES.items():
        mean = getattr(by, name)
        right = None if mean.mean is None else 100 * mean.mean
        error = None if mean.se is None else 100 * mean.se
        rows.append(TableRow(words, (None if right is None else Cell(right, error, 1),)))
    note = f"A second model learned to recall pairs; its gate fires on {by.rate:.0%} of the tokens."
    table = Table(title, "attention runs", ("right answers, %",), tuple(rows))
    return PageSection(title, notes=(note,), tables=(table,))


def drawings(panels: Sequence[Panel]) -> tuple[Drawing, ...]:
    """The panels that have something to draw."""
    kept = [panel for panel in panels if any(len(curve.x) for curve in panel.curves)]
    return tuple(Drawing(figures.inline(figures.draw("panel", p)), p.title) for p in kept)


def learning(data: RunData) -> list[Panel]:
    """Loss, learning rate, gradient norm and speed over training."""
    train, norms = data.curve("loss"), data.curve("grad_norm")
    valid = _curve("validation", [(line.step, line.valid.nll) for line in data.evals], 1, "dots")
    smooth = running_mean(train.y, max(1, round(len(train.y) * SMOOTH)))
    loss = [
        PanelCurve("each step", train.x, train.y, 0, "thin"),
        PanelCurve("train", train.x, smooth),
        valid,
    ]
    unigram = data.findings.unigram.nll if data.findings and data.findings.unigram else None
    level = None if unigram is None else (unigram, "token frequencies")
    speed = PanelCurve("tokens/s", [line.step for line in data.steps], data.speed)
    log = min(norms.y, default=0) > 0
    return [
        Panel("Loss", "nats per token", loss, level=level),
        Panel("Learning rate", "learning rate", [data.curve("lr")], zero=True),
        Panel("Gradient norm", "norm before clipping", [norms], log=log),
        Panel("Speed", "tokens per second", [speed], zero=True),
    ]


def gates_section(data: RunData) -> PageSection:
    """Firing rates, scores and thresholds of every block over training."""
    if not data.blocks:
        return PageSection("Gates over training")
    each, fire = range(data.blocks), [data.of_block(k, "fire") for k in range(data.blocks)]
    sigma, alpha = ([data.of_block(k, key) for k in each] for key in ("sigma", "alpha"))
    panels = [
        Panel("Firing rate", "share of tokens", fire, limits=(0.0, 1.0)),
        Panel("Standard deviation of scores", "σ", sigma, zero=True),
        Panel("Weight of a block's output", "mean α", alpha),
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
    low, high = (data.of_block(index, k, "scores, 10-90 %") for k in ("score_10", "score_90"))
    paired = bool(low.x) and list(low.x) == list(high.x)
    shown = [curve for curve in curves if curve.x] or [
        PanelCurve("scores, 10 %", low.x, low.y, index, "thin")
    ]
    band = (low, high) if paired else None
    return Panel(f"Block {index}: threshold", "entropy / log V", shown, band=band)


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
        spans = (f"{fires:.1%}", f"{low:.1%} - {high:.1%}", valid)
        rows.append(TableRow(str(index), (*cells, *spans)))
    fires_heads = ("fires", "fires, 10-90 % of all steps", "fires on held-out text")
    note = (
        f"μ, σ, τ, α and the firing rate are means of the last {len(last):,} steps, "
        f"{last[0].step:,} to {last[-1].step:,}."
    )
    columns = ("μ", "σ", "threshold τ", "mean α", *fires_heads)
    return Table("Gates over training", "block", columns, tuple(rows), notes=(note,))


def held_out_section(data: RunData) -> PageSection:
    """Scores per block; a gate of another kind compares another score."""
    title, findings = "Gates on held-out text", data.findings
    if not findings or not findings.blocks:
        return PageSection(title)
    kind = next((text.gate for text in findings.texts), None)
    label = "entropy / log V" if kind == "entropy" else f"score of the gate {kind or ''}".strip()
    shown = []
    for block, scores in enumerate(findings.blocks):
        threshold = "no threshold" if scores.threshold is None else f"τ {scores.threshold:.3f}"
        svg = figures.inline(figures.draw("histogram", BlockScores(block, scores, label)))
        shown.append(Drawing(svg, f"Block {block}: {scores.fire:.1%} fire", threshold))
    judged = findings.judged
    note = (
        f"The final model on {judged.tokens:,} tokens ({judged.split}). Right of the "
        "threshold τ attention runs."
    )
    return PageSection(title, notes=(note,), figures=tuple(shown))


def texts_section(data: RunData) -> PageSection:
    """Texts that the model read and wrote, token by token."""
    texts = data.findings.texts if data.findings else ()
    note = (
        "Each box is a token, coloured by the entropy after reading it; a filled dot means that a "
        "block's attention ran there. Bold tokens were given, the others are the model's. Point at "
        "a token for its numbers."
    )
    return PageSection("Texts", notes=(note,) if texts else (), strips=strips(texts))


def how_section(data: RunData) -> PageSection:
    """Recipe, model, machine and events."""
    machine = typed.tree(data.machine)
    machine.pop("version", None)
    rows = [TableRow(name, (_listed(value),)) for name, value in machine.items()]
    events = [TableRow(event.time, (event.event, event.message)) for event in data.events]
    tables = {
        "Machine": Table("Machine", "what", ("value",), tuple(rows)),
        "Events": Table("Events", "time", ("event", "what happened"), tuple(events)),
    }
    details = [json_details("Recipe", data.config)]
    details += [json_details("Model", data.findings.model)] if data.findings else []
    details += [Details(name, table) for name, table in tables.items() if table.lines]
    return PageSection("How it was run", details=tuple(details))


def _listed(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple | list) else str(value)
