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
from amor.records.recall import Mean, RecallByPolicy
from amor.records.run import block_means, settled
from amor.run import Run
from amor.study import page
from amor.study.figures.histogram import BlockScores
from amor.study.figures.panel import Panel, PanelCurve
from amor.study.page import PageSection, draw, percents
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
            found = f"of {len(self.findings.blocks)} blocks"
            raise AmorError(f"{run.findings}: {found}, where {run.metrics} has {self.blocks}")

    @property
    def speed(self) -> list[float]:
        """Tokens per second of every step."""
        return [line.timing.tokens_per_second for line in self.steps]

    @property
    def last_loss(self) -> str:
        """The training loss of the last 20 steps, of those that are finite."""
        losses = self.curve("loss").y[-20:]
        return f"{statistics.mean(losses):.3f}" if losses else "not finite"

    @property
    def perplexities(self) -> tuple[float | None, float | None]:
        """Of held-out text by the last evaluation, and of guessing it by token frequencies."""
        valid = self.evals[-1].valid if self.evals else None
        unigram = self.findings.unigram if self.findings else None
        own = valid.perplexity if valid and valid.nll is not None else None
        return own, unigram.perplexity if unigram else None

    @property
    def recalled(self) -> tuple[float, float] | None:
        """The share of right answers to the questions of its task, and that of guessing."""
        right = self.recall.token.mean if self.recall else None
        return (right, self.recall.chance) if self.recall and right is not None else None

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
    page.put(run.folder / BY_POLICY, typed.text(record))
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
    return page.render_page(data.recipe.name, subtitle, words, facts(data), sections, footer)


def conclusion(data: RunData) -> Iterator[str]:
    """What the run came to, in sentences."""
    valid, unigram = data.perplexities
    if valid is not None:
        than = "" if unigram is None else f"; guessing by token frequencies has {unigram:,.0f}"
        yield f"Held-out text has a perplexity of {valid:,.1f}{than}."
    else:
        loss = f"The training loss of the last steps is {data.last_loss}"
        yield f"{loss}; held-out text was not evaluated."
    if (findings := data.findings) and (worth := findings.attention):
        gate, saves = worth.gate, "saves nothing that can be measured"
        if gate.saved > FEW * gate.se:
            more = gate.saved > worth.chance.saved + FEW * gate.se
            than = "more than" if more else "about as much as"
            saves = f"saves {gate.saved:.3f} ± {gate.se:.3f} nats per token"
            saves = f"{saves}, {than} on as many tokens chosen by chance"
        fires = percents(block.fire for block in findings.blocks)
        if any(block.fire for block in findings.blocks):
            yield f"Attention runs on {fires} of held-out tokens and {saves}."
        else:
            yield f"Attention runs on none of the held-out tokens{why_none_fires(data)}."
    elif data.blocks:
        yield f"Attention ran on {data.fire:.0%} of the tokens of the last step, mean of blocks."
    if data.recalled:
        own, guessing = data.recalled
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
    findings, (valid, unigram) = data.findings, data.perplexities
    shown = {"training loss, last steps (nats)": data.last_loss}
    if valid is not None:
        shown["validation loss (nats)"] = f"{data.evals[-1].valid.nll:.3f}"
        shown["validation perplexity"] = f"{valid:,.1f}"
    if unigram is not None:
        shown["perplexity of token frequencies"] = f"{unigram:,.0f}"
    if data.recalled:
        shown["right answers"], shown["right by guessing"] = (f"{x:.1%}" for x in data.recalled)
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
        right: Mean = getattr(by, name)
        error = None if right.se is None else 100 * right.se
        cell = None if right.mean is None else Cell(100 * right.mean, error, 1)
        rows.append(TableRow(words, (cell,)))
    note = f"A second model learned to recall pairs; its gate fires on {by.rate:.0%} of the tokens."
    table = Table(title, "attention runs", ("right answers, %",), tuple(rows))
    return PageSection(title, notes=(note,), tables=(table,))


def drawings(panels: Sequence[Panel]) -> tuple[page.Drawing, ...]:
    """The panels that have something to draw."""
    kept = [panel for panel in panels if any(len(curve.x) for curve in panel.curves)]
    return tuple(draw("panel", panel, panel.title) for panel in kept)


def learning(data: RunData) -> list[Panel]:
    """Loss, learning rate, gradient norm and speed over training."""
    train, norms = data.curve("loss"), data.curve("grad_norm")
    valid = _curve("validation", [(line.step, line.valid.nll) for line in data.evals], 1, "dots")
    smooth = running_mean(train.y, max(1, round(len(train.y) * SMOOTH)))
    each_step = PanelCurve("each step", train.x, train.y, 0, "thin")
    loss = [each_step, PanelCurve("train", train.x, smooth), valid]
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
    middle = data.of_block(index, "mu", "median μ", "dashed")
    curves = [middle, data.of_block(index, "tau", "threshold τ")]
    low, high = (data.of_block(index, k, "scores, 10-90 %") for k in ("score_10", "score_90"))
    band = (low, high) if low.x and list(low.x) == list(high.x) else None
    lowest = PanelCurve("scores, 10 %", low.x, low.y, index, "thin")
    shown = [curve for curve in curves if curve.x] or [lowest]
    return Panel(f"Block {index}: threshold", "entropy / log V", shown, band=band)


def gate_table(data: RunData) -> Table:
    """The numbers of every gate at the end of training, and between which firing rates it stayed
    for 80 % of it."""
    held_out, last = data.findings.blocks if data.findings else (), settled(data.steps)
    rows = []
    for index, mean in enumerate(block_means(last)):
        rates = sorted(line.blocks[index].fire for line in data.steps)
        low, high = rates[(len(rates) - 1) // 10], rates[(len(rates) - 1) * 9 // 10]
        numbers = (mean.mu, mean.sigma, mean.tau, mean.alpha)
        cells = (None if number is None else Cell(number, digits=3) for number in numbers)
        valid = f"{held_out[index].fire:.1%}" if held_out else None
        spans = (f"{mean.fire:.1%}", f"{low:.1%} - {high:.1%}", valid)
        rows.append(TableRow(str(index), (*cells, *spans)))
    fires_heads = ("fires", "fires, 10-90 % of all steps", "fires on held-out text")
    steps = f"the last {len(last):,} steps, {last[0].step:,} to {last[-1].step:,}"
    note = f"μ, σ, τ, α and the firing rate are means of {steps}."
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
        fires = f"Block {block}: {scores.fire:.1%} fire"
        shown.append(draw("histogram", BlockScores(block, scores, label), fires, threshold))
    judged = f"The final model on {findings.judged.tokens:,} tokens ({findings.judged.split})"
    note = f"{judged}. Right of the threshold τ attention runs."
    return PageSection(title, notes=(note,), figures=tuple(shown))


def texts_section(data: RunData) -> PageSection:
    """Texts that the model read and wrote, token by token."""
    texts = data.findings.texts if data.findings else ()
    note = (
        "Each box is a token, coloured by the entropy after reading it; a filled dot means that a "
        "block's attention ran there. Bold tokens were given, the others are the model's. Point at "
        "a token for its numbers."
    )
    return PageSection("Texts", notes=(note,) if texts else (), strips=page.strips(texts))


def how_section(data: RunData) -> PageSection:
    """Recipe, model, machine and events."""
    machine = typed.tree(data.machine)
    machine.pop("version", None)
    words = {k: ", ".join(v) if isinstance(v, tuple | list) else str(v) for k, v in machine.items()}
    rows = tuple(TableRow(name, (value,)) for name, value in words.items())
    events = tuple(TableRow(event.time, (event.event, event.message)) for event in data.events)
    tables = (
        Table("Machine", "what", ("value",), rows),
        Table("Events", "time", ("event", "what happened"), events),
    )
    details = [page.json_details("Recipe", data.config)]
    details += [page.json_details("Model", data.findings.model)] if data.findings else []
    details += [page.Details(table.title, table) for table in tables if table.lines]
    return PageSection("How it was run", details=tuple(details))
