"""Laws of watching a run: the display, the trackers, the findings and
the report drawn from them."""

import io
import json
import math
import re
import shutil
import sys
import types
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import msgspec
import pytest
import torch
from evaluations import fits_a_column
from laws import plain
from msgspec.structs import replace
from rich.console import Console
from training import small_recipe, trained

from amor.cli import main
from amor.cli._training import run_result, train_observed
from amor.data.shards import Shards
from amor.data.stats import counts, unigram_entropy
from amor.errors import AmorError
from amor.judge import findings
from amor.records.findings import AttentionWorth, Findings, HeldOutLoss, Histogram, Loss
from amor.records.run import (
    EvalTiming,
    Evaluated,
    Event,
    GateLine,
    Machine,
    Step,
    StepTiming,
    Valid,
    settled,
)
from amor.records.trace import Guess, Token, Trace
from amor.records.value import Saving
from amor.run import Run
from amor.study import report
from amor.study.figures import draw
from amor.study.figures.histogram import BlockScores
from amor.study.figures.panel import thin
from amor.train import display, trackers
from amor.train.look import summarise_run
from amor.train.loop import train
from amor.train.recipe import Recipe
from amor.train.watch import RunStarted

EMPTY = {"meta", "br", "input"}


class Reader(HTMLParser):
    """Reads a page strictly: every tag is closed, in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], ""
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def block(step):
    numbers = {"mu": 0.7, "sigma": 0.1, "tau": 0.72, "alpha": 0.5, "score_10": 0.5, "score_90": 0.9}
    return GateLine(fire=0.3 + 0.01 * (step % 10), **numbers)


def token(text, fire):
    guesses = (Guess(text="a", p=0.5),)
    return Token(
        text=text, entropy=(0.9, 0.8), fire=fire, final_entropy=0.8, surprise=2.5, guesses=guesses
    )


def metrics(step, loss, blocks=2):
    timing = StepTiming(seconds=0.5, tokens_per_second=2000.0)
    numbers = {"lr": 1e-3, "grad_norm": 1.0, "tokens": 1000 * step}
    return Step(step=step, loss=loss, blocks=(block(step),) * blocks, timing=timing, **numbers)


def judged(step, nll):
    perplexity = None if nll is None else math.exp(nll)
    valid = Valid(nll=nll, perplexity=perplexity, tokens=100, fire=(0.4, 0.4))
    return Evaluated(step=step, valid=valid, timing=EvalTiming(seconds=0.1))


@pytest.fixture
def run(tmp_path):
    """A run directory written by hand: 30 steps of a model with two blocks."""
    run = Run(tmp_path / "run")
    run.make()
    run.write_config(
        {
            "name": "<invented>",
            "model": {"name": "amor-mamba2", "scale": "tiny", "changes": {}},
            "data": "",
        }
    )
    run.write(
        run.machine, Machine(cpu="an abacus", gpus=(), gemm_gflops=100.0, flops_per_token=1e7)
    )
    for step in range(1, 31):
        run.measured(metrics(step, loss=8 - 0.1 * step))
    run.measured(judged(30, 5.25))
    run.happened(Event(event="spike", message="step 7: a spike"))
    tokens = token("<b>", (True, False)), token(" it\n", (True, True))
    text = Trace(
        title="Written", given=1, blocks=2, gate="entropy", thresholds=(0.7, None), tokens=tokens
    )
    shares = (0.0,) * 30 + (1 / 30,) * 30
    held = Histogram(fire=0.42, threshold=0.72, low=0.0, high=1.0, shares=shares, median=0.7)
    found = Findings(
        step=30,
        parameters=1234567,
        model={"blocks": {"gate": "entropy"}},
        judged=HeldOutLoss(split="valid", tokens=100, nll=5.25, perplexity=math.exp(5.25)),
        unigram=Loss(nll=6.5, perplexity=math.exp(6.5)),
        blocks=(held, held),
        texts=(text,),
    )
    run.write(run.findings, found)
    return run


def drawn(run):
    return report.write(run).read_text()


def test_gates_are_averaged_over_the_last_tenth_of_a_run_but_no_fewer_than_twenty_steps():
    for steps, kept in ((7, 7), (50, 20), (300, 30), (200_000, 10_000)):
        assert settled(range(steps)) == range(steps - kept, steps)


def test_a_report_is_made_from_the_files_of_a_run_alone(run):
    text = drawn(run)
    page = Reader(text)
    for words in (
        "<invented>",
        "190.6",
        "665",
        "1,234,567",
        "2,000",
        "20%",
        "an abacus",
        "step 7: a spike",
        "τ 0.720",
    ):
        assert words in page.words, words
    assert (
        text.count("<svg") == 4 + 3 + 2 + 2
    )  # learning, gates, a threshold a block, a histogram a block
    assert "30.0% - 38.0%" in page.words  # of the firing rate, 10 % to 90 % of the steps


def test_a_report_fetches_nothing(run):
    text = drawn(run)
    assert not re.search(r"(src|href)=(?!\"#)|https?:(?!//www\.w3\.org/)|@import|url\((?!#)", text)


def test_every_drawing_of_a_report_is_sound_and_takes_the_colour_of_the_page(run):
    drawings = re.findall(r"<svg.*?</svg>", drawn(run), re.S)
    for svg in drawings:
        tree = ET.fromstring(svg)
        assert len(list(tree.iter("{http://www.w3.org/2000/svg}path"))) > 10
        assert "currentColor" in svg and "#222222" not in svg


def test_panels_draw_what_the_metrics_say_inside_their_frames(run):
    data = report.RunData(run)
    panels = {
        panel.title: panel for panel in [*report.learning(data), report.threshold_panel(data, 1)]
    }
    loss = draw("panel", panels["Loss"])
    lines = {line.get_label(): line for line in loss.axes[0].lines}
    assert list(lines["_"].get_xdata()) == list(range(1, 31))
    assert list(lines["_"].get_ydata()) == pytest.approx([8 - 0.1 * step for step in range(1, 31)])
    assert lines["validation 5.25"].get_ydata() == [5.25] and lines[
        "token frequencies"
    ].get_ydata() == [6.5, 6.5]
    threshold = draw("panel", panels["Block 1: threshold"])
    assert [set(line.get_ydata()) for line in threshold.axes[0].lines] == [{0.7}, {0.72}]
    held = draw("histogram", BlockScores(0, data.findings.blocks[0], "score"))
    bars = [
        (bar.get_x() + bar.get_width() / 2 > 0.72, bar.get_alpha()) for bar in held.axes[0].patches
    ]
    assert len(bars) == 60 and all((alpha is None) == right for right, alpha in bars)
    for drawing in (loss, threshold, held):
        fits_a_column(drawing)
        paper, inside = drawing.bbox_inches, drawing.get_tightbbox()
        assert (
            paper.x0 <= inside.x0
            and inside.x1 <= paper.x1
            and paper.y0 <= inside.y0
            and inside.y1 <= paper.y1
        )


def texts_of(page):
    """The traced texts that a page draws."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["traces"]


def test_the_texts_of_a_report_are_drawn_from_the_trace_as_those_of_a_trace_page_are(run):
    (text,) = texts_of(drawn(run))
    assert [token["fire"] for token in text["tokens"]] == [[True, False], [True, True]]
    assert text["thresholds"] == [0.7, None] and text["given"] == 1


def test_a_report_begins_with_its_conclusion_and_its_tiles_hold_one_number_each(run):
    worth = {name: Saving(saved=s, se=0.001) for name, s in RATES.items()}
    found = replace(run.read_findings(), attention=AttentionWorth(fire=0.4, **worth))
    run.write(run.findings, found)
    text = drawn(run)
    assert 0 < text.index('class="lead"') < text.index('class="tiles"') < text.index("<h2>")
    words = Reader(text).words
    assert (
        "Held-out text has a perplexity of 190.6; guessing by token frequencies has 665." in words
    )
    saved = "Attention runs on 42 / 42 % of held-out tokens and saves 0.016 ± 0.001 nats per token"
    assert f"{saved}, more than on as many tokens chosen by chance." in words
    blind = worth | {"chance": Saving(saved=0.0155, se=0.001)}
    attention = AttentionWorth(fire=0.4, **blind)
    run.write(run.findings, replace(found, attention=attention))
    assert any("about as much as on as many tokens" in each for each in report.sentences(run))
    tiles = dict(re.findall(r'"tile"><b>(.*?)</b><span>(.*?)</span>', text))
    assert len(tiles) >= 10 and {"0.016", "0.006", "0.010"} <= tiles.keys()
    for value in tiles:
        assert re.fullmatch(r"[\d,]+(\.\d+)?(%| s| min)?", value), value


def test_a_gate_that_fires_nowhere_is_said_plainly_with_the_reason_in_a_short_run(run):
    worth = {name: Saving(saved=0.0, se=0.0) for name in RATES}
    found = run.read_findings()
    shut = tuple(replace(block, fire=0.0) for block in found.blocks)
    attention = AttentionWorth(fire=0.0, **worth)
    run.write(run.findings, replace(found, blocks=shut, attention=attention))
    words = " ".join(report.sentences(run))
    assert "Attention runs on none of the held-out tokens: the thresholds are averages" in words
    assert "about 100 steps" in words and "in 30; train longer" in words
    for step in range(31, 302):
        run.measured(metrics(step, loss=5.0))
    assert "Attention runs on none of the held-out tokens." in report.sentences(run)


def test_a_run_faster_than_the_ceiling_measured_before_it_has_no_share_of_it(run):
    for rate, shown in ((1e6, True), (1e-3, False)):
        run.write(run.machine, replace(run.read_machine(), gemm_gflops=rate))
        assert ("of the machine's ceiling" in Reader(drawn(run)).words) == shown
    pace = display.Pace(ABOUT, 1.0)
    pace.took(1, 2.0)
    assert pace.share is None


RATES = {"gate": 0.016, "chance": 0.006, "everywhere": 0.010}


def test_what_the_demo_recalls_by_where_attention_runs_stands_in_its_report(run):
    assert "attention is needed" not in drawn(run)
    means = {"gate": 0.97, "chance": 0.21, "everywhere": 0.985, "never": 0.04}
    by_policy = {name: {"mean": mean, "se": 0.01} for name, mean in means.items()}
    page = report.add_recall(run, {"rate": 0.146} | by_policy).read_text()
    assert Reader(page).words.count("Where attention is needed: recall") == 1
    for words in ("where the gate chose", "97.0±1.0", "21.0±1.0", "98.5±1.0", "4.0±1.0"):
        assert words in page, words
    sentence = (
        "97% of the answers are right with attention on 15% of the tokens, where the gate chose"
    )
    assert sentence in Reader(page).words
    assert report.write(run).read_text() == page  # read again from the run directory


def test_a_run_without_findings_or_numbers_that_are_not_finite_still_has_a_report(run):
    (run.folder / "findings.json").unlink()
    run.measured(judged(31, None))
    run.measured(metrics(32, loss=None))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        for gate in line.get("blocks", ()):
            gate["tau"] = None
            gate.pop("mu")
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Reader(drawn(run))
    assert "Firing rate" in page.words and "Texts" not in page.words


@pytest.mark.parametrize("name", ["amor-mamba2", "transformer"])
def test_every_run_ends_with_a_report(name, prepared, tmp_path, capsys):
    recipe = small_recipe(prepared, name, steps=3)
    ended = train_observed(recipe, tmp_path / "run")
    page = Reader((tmp_path / "run" / "report.html").read_text())
    said = capsys.readouterr().out
    assert f"report: {run_result(ended)['report']}\n" in said
    assert "\nHeld-out text has a perplexity of " in said and "; guessing by token freq" in said
    assert "Written by the model" in page.words and "of the machine's ceiling" in page.words
    assert ("Gates over training" in page.words) == (name == "amor-mamba2")
    text = (tmp_path / "run" / "report.html").read_text()
    assert sum(len(each["tokens"]) for each in texts_of(text)) > 100


def test_findings_judge_as_the_trainer_did(prepared, tmp_path):
    valid = trained(small_recipe(prepared, steps=3), tmp_path / "run")["ended"].valid
    found = plain(summarise_run(Run(tmp_path / "run")))
    assert found["judged"]["tokens"] == valid.tokens
    assert found["judged"]["nll"] == pytest.approx(valid.nll, rel=1e-6)
    for held, fire in zip(found["blocks"], valid.fire, strict=True):
        assert held["fire"] == pytest.approx(fire)
        assert sum(held["shares"]) == pytest.approx(1, abs=1e-4)


def test_runs_stand_side_by_side_in_a_table_and_a_figure(run, tmp_path, capsys):
    other = Run(tmp_path / "other")
    shutil.copytree(run.folder, other.folder)
    other.write_config(
        {"name": "o", "model": {"name": "mamba2", "scale": "tiny", "changes": {}}, "data": ""}
    )
    assert (
        main(
            [
                "report",
                str(run.folder),
                str(other.folder),
                "--figure",
                str(tmp_path / "c.svg"),
                "--json",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    first, second = json.loads(out.splitlines()[-1])["runs"]
    assert (first["model"], second["model"]) == ("amor-mamba2", "mamba2")
    assert first["curve"] == [{"tokens": 30_000, "minutes": pytest.approx(0.25), "nll": 5.25}]
    assert (
        first["loss"] == pytest.approx(8 - 0.1 * 20.5)
        and first["firing"][-1]["fire"] == [block(30).fire] * 2
    )
    assert "5.250" in out and "30,000" in out
    assert "<svg" in (tmp_path / "c.svg").read_text()


def test_runs_whose_losses_cannot_be_compared_are_refused(run, tmp_path, capsys):
    other = Run(tmp_path / "other")
    shutil.copytree(run.folder, other.folder)
    other.write_config(
        {
            "name": "o",
            "model": {"name": "mamba2", "scale": "tiny", "changes": {"vocab": 512}},
            "data": "",
        }
    )
    assert main(["report", str(run.folder), str(other.folder)]) == 2
    assert "[512, 4096]" in capsys.readouterr().err
    assert main(["report", str(run.folder), str(tmp_path)]) == 2


def test_a_report_finds_data_that_has_moved_and_says_when_it_is_gone(prepared, tmp_path, capsys):
    trained(small_recipe(prepared, steps=1), tmp_path / "run")
    run = Run(tmp_path / "run")
    run.write_config(run.read_config() | {"data": str(tmp_path / "gone")})
    assert main(["report", str(run.folder)]) == 2
    assert "give --data FOLDER" in capsys.readouterr().err
    assert main(["report", str(run.folder), "--data", str(prepared)]) == 0
    assert main(["report", str(run.folder), "--quick"]) == 0
    assert main(["report", str(tmp_path)]) == 2


def test_the_unigram_baseline_is_that_of_the_data(prepared):
    train_, valid = Shards.open(prepared / "train"), Shards.open(prepared / "valid")
    assert findings.unigram(train_, counts(valid)).nll == pytest.approx(
        unigram_entropy(train_, valid)
    )


def test_histograms_hold_every_score_also_outside_0_and_1():
    found = findings.histogram(torch.tensor([-1.0, 0.5, 3.0, 3.0]), 0.5, math.inf)
    assert (found.low, found.high, found.threshold) == (-1, 3, None) and sum(
        found.shares
    ) == pytest.approx(1)
    assert found.shares[-1] == 0.5


def test_a_long_curve_is_thinned_to_its_means():
    x, y = thin(list(range(10_000)), [float(i % 2) for i in range(10_000)])
    assert len(x) <= 400 and all(abs(v - 0.5) < 0.03 for v in y)


RECIPE = Recipe.from_dict(
    {"steps": 40, "context": 10, "batch": 10, "model": {"name": "amor-mamba2", "scale": "tiny"}}
)
ABOUT = RunStarted(RECIPE, "m", 10, ["a group"], step=0, steps=40, folder="runs/x", where="here")


def shown_step(step):
    timing = StepTiming(seconds=2.0, tokens_per_second=50.0)
    return msgspec.structs.replace(
        metrics(step, 5.0 / step, blocks=3), grad_norm=0.5, timing=timing
    )


def test_where_there_is_no_terminal_plain_lines_are_printed(capsys):
    shown = display.for_people(ceiling=1e12)
    assert isinstance(shown, display.Lines)
    shown.on_start(ABOUT)
    for step in range(1, 21):
        shown.on_step(shown_step(step))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/40", "10/40", "20/40"]
    assert "50 tokens/s (0% of the ceiling)" in lines[0] and "to go" in lines[0]
    assert "fires 31/31/31 %, thresholds 0.720/0.720/0.720" in lines[0] and "\x1b" not in "".join(
        lines
    )


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_picture_fits_its_terminal(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=24)
    shown = display.Display(1e12, console)
    shown.on_start(ABOUT)
    for step in range(1, 21):
        shown.on_step(shown_step(step))
    shown.on_event(Event(event="x", message="something [strange]"))
    shown.close()
    plain = Console(file=io.StringIO(), width=width)
    plain.print(shown.render())
    lines = plain.file.getvalue().splitlines()
    assert len(lines) < 24 and all(len(line) <= width for line in lines)
    for words in ("step 20/40", "to go", "0.2500", "ceiling", "0.720", "30.0%"):
        assert words in plain.file.getvalue()
    assert "something [strange]" in console.file.getvalue()


def test_the_share_of_the_ceiling_is_work_done_over_work_possible():
    pace = display.Pace(ABOUT, 1e10)
    pace.took(1, 2.0)
    assert pace.share == pytest.approx(50 * display.flops_per_token(RECIPE) / 1e10)
    assert display.Pace(ABOUT, None).share is None


def test_the_time_to_go_does_not_count_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = display.Pace(ABOUT, None)
    for step, moment in (
        (1, 100.0),
        (2, 102.0),
        (3, 104.0),
    ):  # the first step took 100 s, the others 2 s
        now[0] = moment
        pace.took(step, 1.0)
    assert pace.to_go == 2.0 * 37 and pace.left == "1:14 to go"


class Told:
    """Stands for a tracker's package: remembers what it was told."""

    def __init__(self):
        self.values, self.ended = {}, 0

    def init(self, **about):
        self.about = about

    def log(self, values, step):
        self.values[step] = values

    def finish(self):
        self.ended += 1

    def SummaryWriter(self, folder, purge_step):  # noqa: N802
        self.about = {"folder": folder, "purge_step": purge_step}
        return types.SimpleNamespace(add_scalar=self.add_scalar, close=self.finish)

    def add_scalar(self, name, value, step):
        self.values.setdefault(step, {})[name] = value


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_a_tracker_is_told_what_the_metrics_file_is_told(
    name, module, prepared, tmp_path, monkeypatch
):
    told = Told()
    monkeypatch.setitem(sys.modules, module, told)
    recipe = small_recipe(prepared, steps=3, track=name)
    train(recipe, tmp_path / "run", trackers.trackers(recipe.track))
    line = next(line for line in Run(tmp_path / "run").lines() if line.step == 2)
    assert told.values[2]["loss"] == line.loss
    assert told.values[2]["block1/tau"] == line.blocks[1].tau
    assert "valid/nll" in told.values[3] and "valid/fire0" in told.values[3]
    assert told.ended == 1


def test_a_tracker_that_is_not_installed_or_unknown_is_said_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(AmorError, match=r"needs the package wandb.*amor\[track\]"):
        trackers.trackers("wandb")
    with pytest.raises(AmorError, match="tensorboard"):
        trackers.trackers("tensorbored")
    assert trackers.trackers("") == []
