"""Laws of studies: what stands is kept, a kill changes no number, a table says what the files
say, a wrong study is one line."""

import ast
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluations import fits_a_column
from laws import small, tokens
from msgspec.structs import replace
from studying import finished, killed
from training import trained

from amor import registry, typed
from amor.cli import Parser, main
from amor.cli import study as study_verb
from amor.data.loader import cut
from amor.data.tasks.base import read_task
from amor.errors import AmorError
from amor.experiment import jobs, judging
from amor.experiment import plan as plans
from amor.experiment.judging import missing
from amor.experiment.status import Estimator, RunStatus
from amor.experiment.subject import FinishedRun, step_of
from amor.gates.override import aimed
from amor.judge.gates import own_gates
from amor.judge.loop import join_chunks, run_windows
from amor.judge.policies import PolicyEvaluator
from amor.judge.recall import recall
from amor.measures.loss import LossMeasure, LossResult
from amor.measures.rates import RatePolicy, RatesResult
from amor.measures.size import ModelSize, SizeMeasure
from amor.measures.speed import meet_rate
from amor.records.run import EvalTiming, Evaluated, Valid
from amor.records.value import TextSource
from amor.run import Run
from amor.study import figures, result_page, results
from amor.study.cells import pooled_error
from amor.study.definition import Measurement, PlannedRun, Study
from amor.study.paired import Grid
from amor.study.results import StudyRun, best_learning_rates
from amor.study.tables import make_tables
from amor.study.tables.frontier import frontier_points

SMOKE = plans.HOME / "smoke.toml"


@pytest.fixture(scope="module")
def smoke(prepared, tmp_path_factory):
    """The whole study, two runs at a time."""
    folder = tmp_path_factory.mktemp("smoke") / "study"
    finished(
        "smoke", "--data", prepared, "--out", folder, "--jobs", 2, log=folder.with_suffix(".log")
    )
    return folder


@pytest.fixture(scope="module")
def begun(prepared, tmp_path_factory):
    """A study of one run, trained and not judged."""
    folder = tmp_path_factory.mktemp("begun")
    line = (
        "steps = 1, context = 8, batch = 2, micro_batch = 1, eval = {windows = 2}, "
        "model.name = 'mamba2'"
    )
    small = "vocab = 512, width = 32, d_ff = 48, pattern = 'mamba2', 'mixers.mamba2.head_size' = 16"
    text = f"title = 't'\nset = {{{line}, model.changes = {{{small}}}}}\n[[runs]]\nname = 'a'\n"
    (folder / "one.toml").write_text(text)
    plan = plans.plan(plans.read(folder / "one.toml"), "one", str(prepared), folder / "study")
    plans.begin(plan)
    trained(plan.recipe(plan.runs[0]), plan.run(plan.runs[0]).folder)
    return folder / "study"


def judged(folder, row, seed, kind):
    return json.loads(
        (folder / "runs" / row / f"seed-{seed}" / "judged" / f"{kind}.json").read_text()
    )["found"]


def untimed(folder):
    """The tables of a study without anything that a clock has measured."""
    held = results.read(folder)
    study = replace(
        held.study,
        judge={**held.study.judge, "speed": None},
        tables=("models", "gates", "value", "rates"),
        figures=(),
    )
    return make_tables(results.Results(replace(held.ledger, study=study), folder))


# what a study ends in


def test_a_study_ends_in_tables_figures_and_a_page_that_needs_nothing_else(smoke):
    for name in (
        "tables.txt",
        "tables.md",
        "tables.tex",
        "losses.svg",
        "losses.png",
        "rates.svg",
        "frontier.svg",
    ):
        assert (smoke / name).stat().st_size > 100
    page = (smoke / "index.html").read_text()
    assert not re.search(r'(src|href)="(http|//)|@import|<link', page)
    for table in make_tables(results.read(smoke)):
        assert table.title in page and table.title in (smoke / "tables.txt").read_text()
    assert page.count("<svg") == 3
    assert 0 < page.index(" has the lowest held-out loss, ") < page.index('class="tiles"')
    for name in results.read(smoke).study.figures:
        fits_a_column(figures.draw(name, results.read(smoke)))


def test_a_table_says_what_the_files_say(smoke):
    table = make_tables(results.read(smoke))[0]
    cells = {
        line.name: dict(zip(table.columns, line.cells))
        for line in table.lines
        if line.kind == "ours"
    }
    windows = {
        row: np.array([judged(smoke, row, seed, "loss")["windows"] for seed in (1, 2)])
        for row in cells
    }
    for row, each in windows.items():
        by_window, by_seed = (
            statistics.stdev(each.mean(axis)) / len(each.mean(axis)) ** 0.5 for axis in (0, 1)
        )
        assert cells[row]["loss"].value == pytest.approx(each.mean(), rel=1e-12)
        assert cells[row]["loss"].error == pytest.approx(
            (by_window**2 + by_seed**2) ** 0.5, rel=1e-12
        )
        speeds = [judged(smoke, row, seed, "speed") for seed in (1, 2)]
        assert cells[row]["train tok/s"].value == statistics.mean(
            speed["train"] for speed in speeds
        )
        assert cells[row]["decode tok/s"].value == statistics.mean(
            1 / speed["decode"][0]["seconds"] for speed in speeds
        )
    over = cells["amor-mamba2"]["loss - mamba2's"]
    difference = windows["amor-mamba2"] - windows["mamba2"]
    assert (
        over.value == pytest.approx(difference.mean(), abs=1e-12)
        and cells["mamba2"]["loss - mamba2's"] is None
    )
    assert 0 < over.error < cells["mamba2"]["loss"].error, "the same windows move both alike"
    printed = f"{over.value:,.4f}±{over.error:,.4f}"
    assert (
        printed in (smoke / "tables.txt").read_text()
        and printed in (smoke / "index.html").read_text()
    )


def test_the_paper_s_rows_stand_below_ours(smoke):
    line = next(
        line
        for line in (smoke / "tables.txt").read_text().split("\n")
        if line.startswith("gated-deltanet-serial")
    )
    assert line.split() == ["gated-deltanet-serial", "-", "-", "12.94", "-", "-", "23,400", "48.6"]


def test_a_loss_is_that_of_the_run_s_model_on_held_out_text(smoke, prepared):
    subject = FinishedRun(Run(smoke / "runs/amor-mamba2/seed-1"))
    asked = results.read(smoke).options("loss")
    found = join_chunks(run_windows(subject.model, subject.windows(asked)))
    assert judged(smoke, "amor-mamba2", 1, "loss")["windows"] == found.nll.double().mean(1).tolist()
    assert Path(judged(smoke, "amor-mamba2", 1, "loss")["data"]["source"]) == prepared / "valid"


def test_a_study_of_a_task_tells_what_is_remembered_at_its_size_and_at_others(tmp_path):
    (tmp_path / "task.toml").write_text(
        """
        title = "A task"
        recipe = "recall/stream"
        tables = ["recall", "reach"]
        set.steps = 2
        set.batch = 2
        set.micro_batch = 2
        set.eval = {every = 1, windows = 2}
        set.task = {pairs = 4, fewest = 2}
        judge.recall.rows = 9
        judge.reach = {rows = 9, at = [{pairs = 2}, {pairs = 3, length = 30}]}
        [[runs]]
        name = "mamba2"
        model = "mamba2"
        """
    )
    assert (
        main(
            ["study", str(tmp_path / "task.toml"), "--out", str(tmp_path / "study"), "--jobs", "1"]
        )
        == 0
    )
    subject = FinishedRun(Run(tmp_path / "study/runs/mamba2/seed-1"))
    task = read_task(subject.recipe.task)
    told = [
        recall(subject.model, each, rows=9)
        for each in (task, task.change(pairs=2), task.change(pairs=3, length=30))
    ]
    own, others = make_tables(results.read(tmp_path / "study"))
    assert [own.lines[0].cells[0].value, *(cell.value for cell in others.lines[0].cells)] == [
        100 * one.token.mean for one in told
    ]
    assert others.columns == ("pairs 2", "pairs 3, length 30")


# kills


def test_a_study_that_is_killed_ends_with_the_same_numbers(smoke, prepared, tmp_path):
    """First with all it began, while it trains; then alone, while others judge for it;
    the next one waits for these."""
    folder, log = tmp_path / "study", tmp_path / "log"
    words = ("smoke", "--data", prepared, "--out", folder, "--jobs", 1)
    ledger = results.read(smoke).ledger

    def trained():
        return [step_of(Run(folder / run.folder)) == run.steps for run in ledger.runs]

    killed(
        *words,
        log=log,
        after=lambda: any(folder.glob("runs/*/*/checkpoints/step-*")),
        programs_too=True,
    )
    assert not any(trained())
    killed(
        *words,
        log=log,
        after=lambda: any(folder.glob("runs/*/*/judged/*.json")),
        programs_too=False,
    )
    assert all(trained()) and len(list(folder.glob("runs/*/*/judged/*.json"))) < 18
    finished(*words, log=log)
    assert untimed(folder) == untimed(smoke)
    for run in ledger.runs:
        for kind in ("size", "loss", "gate", "value", "rates"):
            if (one := smoke / run.folder / "judged" / f"{kind}.json").is_file():
                again = typed.read(dict, folder / run.folder / "judged" / f"{kind}.json")
                assert {**again, "seconds": 0} == {**typed.read(dict, one), "seconds": 0}
    assert not list(folder.rglob(".*.writing"))


def test_what_stands_is_not_done_again(smoke, prepared, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a program was started"))
    before = {path: path.read_bytes() for path in smoke.rglob("judged/*.json")}
    words = ["study", "smoke", "--data", str(prepared), "--out", str(smoke)]
    assert main([*words, "--plan", "--json"]) == 0
    left = json.loads(capsys.readouterr().out.split("\n")[-2])
    assert (
        left["trained"] == left["judged"] == 4
        and left["train_seconds"] == left["judge_seconds"] == 0
    )
    table = (smoke / "tables.txt").read_text()
    assert main(words) == 0
    assert (smoke / "tables.txt").read_text() == table and table.split("\n")[
        2
    ] in capsys.readouterr().out
    assert {path: path.read_bytes() for path in smoke.rglob("judged/*.json")} == before


def test_another_question_is_asked_anew_and_no_other(smoke):
    subject, study = FinishedRun(Run(smoke / "runs/amor-mamba2/seed-1")), results.read(smoke).study
    assert not missing(subject, study)
    assert set(
        missing(
            subject,
            replace(
                study, judge={**study.judge, "loss": {"windows": 3}}, tables=("models",), figures=()
            ),
        )
    ) == {"loss"}
    assert set(missing(replace_weights(subject), study)) == {
        "size",
        "loss",
        "gate",
        "value",
        "rates",
        "choices",
        "speed",
    }
    assert "value" not in missing(
        FinishedRun(Run(smoke / "runs/mamba2/seed-1"), threads=2), study
    ), "it has no gates"


def replace_weights(subject):
    class Other(FinishedRun):
        weights = "of another training"

    return Other(subject.run, subject.threads)


def test_a_study_may_be_shown_in_part(smoke, tmp_path):
    shutil.copytree(smoke, tmp_path / "part", symlinks=True)
    shutil.rmtree(tmp_path / "part/runs/mamba2/seed-2/judged")
    shutil.rmtree(tmp_path / "part/runs/amor-mamba2/seed-1/judged")
    (tmp_path / "part/runs/amor-mamba2/seed-2/judged/rates.json").unlink()
    held = results.read(tmp_path / "part")
    first = make_tables(held)[0]
    assert {"missing: mamba2: seed 2", "missing: amor-mamba2: seed 1, seed 2 (rates)"} <= set(
        first.notes
    )
    cells = dict(zip(first.columns, first.lines[1].cells))
    alone = judged(smoke, "amor-mamba2", 2, "loss")
    assert cells["loss"].value == pytest.approx(alone["nll"]) and cells[
        "loss"
    ].error == pytest.approx(alone["se"])
    assert cells["loss - mamba2's"] is None, "no seed of which both are there"


def test_a_folder_of_other_runs_is_refused(smoke, prepared, capsys):
    assert (
        main(["study", "smoke", "--data", str(prepared), "--out", str(smoke), "--steps", "14"]) == 2
    )
    assert "was trained with steps = 12, not 14" in capsys.readouterr().err
    assert (
        main(
            ["study", "smoke", "--data", str(prepared), "--out", str(smoke), "--set", "context=16"]
        )
        == 2
    )
    assert "context" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["precision='bf16-cpu'", "micro_batch=2", "eval.windows=3"])
def test_runs_of_one_study_are_computed_and_judged_alike(change, begun, prepared, capsys):
    assert (
        main(
            [
                "study",
                str(begun.parent / "one.toml"),
                "--data",
                str(prepared),
                "--out",
                str(begun),
                "--set",
                change,
                "--plan",
            ]
        )
        == 2
    )
    assert f"was trained with {change.partition('=')[0]} = " in capsys.readouterr().err


def test_runs_of_another_text_are_refused_and_a_text_that_was_moved_is_not(
    begun, prepared, tmp_path, capsys
):
    words = ["study", str(begun.parent / "one.toml"), "--out", str(begun), "--plan", "--data"]
    for here, there in (("train", "valid"), ("valid", "train")):
        shutil.copytree(prepared / here, tmp_path / "other" / there)
    assert main([*words, str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"was trained on other data than {tmp_path / 'other'}" in said
    moved = shutil.copytree(prepared, tmp_path / "moved")
    assert main([*words, str(moved)]) == 0
    subject = FinishedRun(Run(begun / "runs/a/seed-1"), data=str(moved))
    assert subject.held_out.folder == moved / "valid" and subject.recipe.data == str(prepared)


def test_a_judgement_that_fails_stops_no_other(begun, monkeypatch, capsys):
    def fails(subject, asked):
        raise AmorError("not today")

    monkeypatch.setattr(SizeMeasure, "measure", fails)
    words = [str(begun), "size,loss", "runs/a/seed-1"]
    assert judging.main(words) == 2
    said = capsys.readouterr()
    assert (
        "runs/a/seed-1: loss in" in said.out
        and said.err.splitlines()[-1] == "runs/a/seed-1: size: not today"
    )
    assert {path.name for path in begun.glob("runs/a/seed-1/judged/*")} == {"loss.json"}
    monkeypatch.undo()
    assert judging.main(words) == 0 and capsys.readouterr().out.startswith("runs/a/seed-1: size in")
    monkeypatch.setattr(LossMeasure, "version", 2)
    ledger = results.read(begun).ledger
    assert set(
        missing(FinishedRun(Run(begun / "runs/a/seed-1"), data=ledger.data), ledger.study)
    ) == {"loss"}


OWN = """
from amor.measures.base import MeasureKind
from amor.records import Record
from amor.study.figures.base import FigureKind
from amor.study.figures.canvas import figure
from amor.study.table import Cell, Table, TableRow

class StepsOptions(Record, frozen=True):
    factor: int = 1

class StepsResult(Record, frozen=True):
    steps: int

class Steps(MeasureKind):
    kind = "my_own_measure.Steps"
    Options, Result = StepsOptions, StepsResult

    @staticmethod
    def measure(subject, options):
        return StepsResult(steps=options.factor * len(subject.steps))

    @staticmethod
    def table(results):
        rows = []
        for row in results.ledger.rows:
            steps = sum(one.steps for one in results.of(row, Steps.kind).values())
            rows.append(TableRow(row, (Cell(steps, digits=0),)))
        return Table("My own", "run", ("steps",), tuple(rows))

class StepsFigure(FigureKind):
    kind = "my_own_measure.StepsFigure"
    needs = frozenset({Steps.kind})

    @staticmethod
    def draw(results):
        drawing = figure(2, 2)
        found = [results.of(row, Steps.kind).values() for row in results.ledger.rows]
        drawing.subplots().plot([one.steps for each in found for one in each])
        return drawing
"""


def test_a_measurement_and_a_figure_are_one_file_and_touch_no_other(
    begun, prepared, tmp_path, monkeypatch
):
    """A study measures, prints and draws what one file outside the package defines."""
    (tmp_path / "my_own_measure.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    study = shutil.copytree(begun, tmp_path / "study", symlinks=True)
    own = (
        'judge."my_own_measure.Steps" = {factor = 7}\ntables = ["models", "my_own_measure.Steps"]\n'
    )
    head = f'extends = "{begun.parent / "one.toml"}"\nfigures = ["my_own_measure.StepsFigure"]\n'
    (tmp_path / "own.toml").write_text(head + own + "judge.loss = {windows = 2}\n")
    plans.begin(plans.plan(plans.read(tmp_path / "own.toml"), "own", str(prepared), study))
    assert judging.main([str(study), "my_own_measure.Steps,loss", "runs/a/seed-1"]) == 0
    written = result_page.write(results.read(study))
    assert [cell.value for cell in make_tables(results.read(study))[1].lines[0].cells] == [7]
    assert (
        "My own" in (study / "index.html").read_text()
        and study / "my_own_measure.StepsFigure.svg" in written
    )
    monkeypatch.setattr(sys.modules["my_own_measure"].Steps, "kind", "steps")
    with pytest.raises(AmorError, match="outside the package it is the dotted path"):
        plans.read(tmp_path / "own.toml")


def test_no_other_file_of_the_package_lists_the_measurements_or_the_figures():
    """What combines measurements may name some of them; a list of all would have
    to grow with every new file."""
    kinds, drawn = set(registry.kinds("measures")), set(registry.kinds("study.figures"))
    package = plans.HOME.parents[1]
    for path in package.rglob("*.py"):
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant)
        }
        assert len(kinds & strings) < len(kinds) / 2 and len(drawn & strings) < len(drawn) / 2, path


def test_results_and_tables_of_a_study_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; from amor import registry; "
    code += "rooms = ('measures', 'study.tables', 'study.figures'); "
    code += (
        "assert all(len(registry.kinds(room)) >= 3 for room in rooms); "
        "import amor.study.result_page"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_study_of_an_earlier_version_can_be_opened(prepared, tmp_path):
    """study.json once listed every kind, with null for those that were not asked for."""
    invented(
        tmp_path,
        prepared,
        {("a", 1, "loss"): losses(1.0, 2.0)},
        judge={"size": {}, "loss": {"windows": 2}},
    )
    tree = json.loads((tmp_path / "study.json").read_text())
    kinds = ("size", "loss", "gate", "value", "rates", "choices", "recall", "reach", "speed")
    whole = {"loss": {"windows": 2, "context": None}, "size": {}}
    tree["study"]["judge"] = {kind: whole.get(kind) for kind in kinds}
    (tmp_path / "study.json").write_text(json.dumps(tree))
    assert list(results.read(tmp_path).study.measurements()) == ["size", "loss"]
    assert cells_of(tmp_path)[0]["a"]["loss"].value == 1.5


def test_a_ledger_without_the_runs_of_a_row_is_refused(prepared, tmp_path):
    """Rows are compared with the baseline by their places in the list."""
    given = {(row, 1, "loss"): losses(1.0, 2.0) for row in ("a", "b")}
    invented(tmp_path, prepared, given, judge={"loss": {"windows": 2}})
    tree = json.loads((tmp_path / "study.json").read_text())
    tree["runs"] = [run for run in tree["runs"] if run["row"] == "a"]
    (tmp_path / "study.json").write_text(json.dumps(tree))
    with pytest.raises(AmorError, match="runs: of 1 rows, where the study has 2"):
        results.read(tmp_path)


# wrong studies


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("{at = [{pears = 2}]}", "pears"),
        ("{at = [{pairs = 100}]}", "pairs is 100, at most 64"),
        ("{rows = 9}", "at"),
    ],
)
def test_sizes_that_no_task_has_are_refused_before_anything_is_trained(
    asked, said, tmp_path, capsys
):
    text = (
        f"title = 't'\nrecipe = 'recall/stream'\njudge.reach = {asked}\ntables = ['reach']\n"
        "[[runs]]\nname = 'a'\n"
    )
    (tmp_path / "one.toml").write_text(text)
    assert (
        main(["study", str(tmp_path / "one.toml"), "--out", str(tmp_path / "study"), "--plan"]) == 2
    )
    assert said in capsys.readouterr().err


WRONG = [
    ("title = 3", "title: expected str"),
    ("seeds = []", "seeds"),
    ("seeds = [1, 1]", "seeds: 1 stands there twice"),
    ("seeds = [0, 0]", "seeds: 0 stands there twice"),
    ("threads = 0", "threads: expected int >= 1, not 0"),
    ("lr = [-1.0]", "lr[0]"),
    ("baselin = 'a'", "no key 'baselin'; did you mean 'baseline'?"),
    ("baseline = 'b'", "no run 'b'; there are a"),
    ("tables = ['modles']", "tables: no table 'modles'; did you mean 'models'?"),
    ("figures = ['accuracy']", "figures: no figure 'accuracy'; choices: frontier, losses, rates"),
    ("tables = ['sweep']", "sweep shows learning rates"),
    ("tables = ['rates']", "rates is made of judge.rates"),
    ("recipe = 'tiny/nothing'", "no recipe 'tiny/nothing'"),
    ("set = {stepps = 3}", "no key 'stepps'; did you mean 'steps'?"),
    ("set = {steps = -3}", "steps"),
    ("set = {model.changes.width = 7}", "does not divide"),
    ("axes = {steps = []}", "axes"),
    ("axes = {steps = [{a = 1}]}", "steps: {'a': 1} is no number"),
    ("judge = {los = {}}", "no key 'los'; did you mean 'loss'?"),
    ("judge = {loss = {windows = 1}}", "judge.loss: windows: expected int >= 2, not 1"),
    (
        "judge = {loss = {windows = 4}, rates = {windows = 2}}\ntables = ['frontier']",
        "side by side",
    ),
    ("judge = {rates = {rates = [1.5]}}\ntables = ['rates']", "rates[0]"),
    (
        "lr = [1e-3]\nset = {eval.every = 0}",
        "lr is chosen by the validation loss, and eval.every is 0",
    ),
    ("title = ", "not TOML"),
]


@pytest.mark.parametrize(("line", "named"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_study_is_answered_in_one_line(line, named, prepared, tmp_path, capsys):
    title = "" if line.startswith("title") else "title = 't'\n"
    (tmp_path / "wrong.toml").write_text(
        f"{title}{line}\n[[runs]]\nname = 'a'\nmodel = 'amor-mamba2'\n"
    )
    assert (
        main(
            [
                "study",
                str(tmp_path / "wrong.toml"),
                "--data",
                str(prepared),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and named in said
    assert not (tmp_path / "out").exists()


def test_runs_that_would_be_one_are_refused(prepared, tmp_path):
    study = typed.convert(Study, {"title": "t", "runs": [{"name": "a b"}, {"name": "a/b"}]}, "here")
    with pytest.raises(AmorError, match="two runs would lie in runs/a-b/seed-1"):
        plans.plan(study, "twins", str(prepared), tmp_path)


def test_axes_learning_rates_and_seeds_multiply(prepared, tmp_path):
    tree = {
        "title": "t",
        "runs": [{"name": "a", "model": "mamba2"}, {"name": "b", "recipe": "tiny/transformer"}],
    }
    tree |= {
        "axes": {"context": [8, 16]},
        "lr": [1e-3, 2e-3],
        "seeds": [1, 2, 3],
        "set": {"steps": 5, "batch": 2},
    }
    plan = plans.plan(typed.convert(Study, tree, "here"), "many", str(prepared), tmp_path)
    assert len(plan.runs) == 2 * 2 * 2 * 3 and plan.ledger.rows == tuple(
        f"{n}, context = {c}" for n in "ab" for c in (8, 16)
    )
    recipe = plan.recipe(plan.runs[-1])
    assert (recipe.model.name, recipe.context, recipe.lr.peak, recipe.seed, recipe.steps) == (
        "transformer",
        16,
        2e-3,
        3,
        5,
    )
    assert plan.runs[-1].folder == "runs/b-context-=-16/lr-0.002/seed-3"


def test_a_study_extends_another_key_by_key_and_its_runs_as_a_whole(tmp_path):
    (tmp_path / "base.toml").write_text(
        "title = 'b'\nset.steps = 5\nset.batch = 2\n[[runs]]\nname = 'a'\n[[runs]]\nname = 'b'\n"
    )
    (tmp_path / "top.toml").write_text("extends = 'base.toml'\ntitle = 't'\nset.steps = 7\n")
    (tmp_path / "other.toml").write_text("extends = 'base.toml'\n[[runs]]\nname = 'c'\n")
    top, other = (plans.read(tmp_path / f"{name}.toml") for name in ("top", "other"))
    assert (top.title, dict(top.set), [run.name for run in top.runs]) == (
        "t",
        {"steps": 7, "batch": 2},
        ["a", "b"],
    )
    assert (other.title, [run.name for run in other.runs]) == ("b", ["c"])


@pytest.mark.parametrize("name", plans.names())
def test_every_study_of_the_package_is_sound(name, prepared, tmp_path):
    study = plans.read(plans.find(name))
    recipes = {
        study.recipe,
        *study.axes.get("recipe", ()),
        *(run.recipe for run in study.runs if run.recipe),
    }
    task = any(recipe.startswith("recall/") for recipe in recipes)
    plan = plans.plan(study, name, None if task else str(prepared), tmp_path)
    for recipe in recipes & {run.recipe for run in plan.runs}:
        seen = {
            plan.recipe(run).step_tokens * run.steps for run in plan.runs if run.recipe == recipe
        }
        assert len(seen) == 1, "models that are compared see as many tokens"


# programs


def test_programs_run_several_at_a_time_and_a_failure_stops_no_other(tmp_path):
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS']); sys.exit(int(sys.argv[1]))"
    work = [
        jobs.Job(str(n), (sys.executable, "-SEc", code, str(n)), tmp_path / f"{n}.log")
        for n in (0, 3, 0)
    ]
    done = jobs.run(work, 2, 7, jobs.JobObserver(), lambda job: True)
    assert sorted(one.code for one in done) == [0, 0, 3] and {one.last_line for one in done} == {
        "7"
    }


def test_a_run_that_another_program_works_on_is_waited_for(tmp_path):
    job = jobs.Job(
        "mine", (sys.executable, "-SEc", "pass"), tmp_path / "log", tmp_path / "run" / "lock"
    )
    assert not jobs.is_locked(job.lock)
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(); time.sleep(60)"
    )
    command = [sys.executable, "-SEuc", code, str(job.lock)]
    left_behind = subprocess.Popen(
        command, stdout=subprocess.PIPE
    )  # as a study of an earlier version locks it
    left_behind.stdout.readline()
    assert jobs.is_locked(job.lock)

    class Ends(jobs.JobObserver):
        ticks = 0

        def on_tick(self, running, waiting):
            assert waiting == [job] or left_behind.poll() is not None
            self.ticks += 1
            if self.ticks == 3:
                left_behind.kill()
                left_behind.wait()

    ends = Ends()
    done = jobs.run([job], 2, 1, ends, lambda job: True)
    assert [one.code for one in done] == [0] and ends.ticks >= 3
    assert jobs.run([job], 2, 1, jobs.JobObserver(), lambda job: False) == [], (
        "another study has done it"
    )


def test_a_command_holds_its_lock_as_long_as_it_lives_and_no_longer(tmp_path):
    """Also when it is killed, and not where the program that started it is."""
    lock, words = tmp_path / "lock", ["-m", "amor.experiment.locked"]
    ran = subprocess.run(
        [sys.executable, *words, str(lock), "train", "no/recipe"], capture_output=True, text=True
    )
    assert (
        ran.returncode == 2 and "no recipe 'no/recipe'" in ran.stderr and not jobs.is_locked(lock)
    )
    code = (
        "import sys, time, runpy; runpy.run_module = lambda *a, **k: (print(sys.argv, "
        "flush=True), time.sleep(60)); "
    )
    code += f"from amor.experiment import locked; locked.main([{str(lock)!r}, 'train', 'x'])"
    held = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert held.stdout.readline() == "['amor', 'train', 'x']\n" and jobs.is_locked(lock)
    held.kill()
    held.wait()
    assert not jobs.is_locked(lock)


def test_programs_are_stopped_and_waited_for_with_the_study(tmp_path):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), "
        "sys.exit(3))); "
    )
    code += "print('begun', flush=True); time.sleep(60)"
    job = jobs.Job("one", (sys.executable, "-SEc", code), tmp_path / "log")

    class Stops(jobs.JobObserver):
        def on_tick(self, running, waiting):
            if job.log.read_text() == "begun\n":
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        jobs.run([job, job], 1, 1, Stops(), lambda job: True)
    assert (
        job.log.read_text() == "begun\nsaved\n"
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )


@pytest.mark.parametrize("worker", ["locked", "judging"])
def test_no_worker_outlives_a_study_that_is_killed(worker, tmp_path):
    """kill -9 to the study: its programs get SIGTERM, so that training can write a checkpoint."""
    log, code = tmp_path / "log", "import signal, sys, time, runpy, amor.experiment.judging as j; "
    code += "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(3))); "
    code += "wait = lambda *a, **k: (print('begun', flush=True), time.sleep(60)); "
    code += "runpy.run_module = j.work = wait; "
    words = [str(tmp_path / "lock"), "train", "x"]
    code += f"from amor.experiment import {worker}; {worker}.main({words})"
    study = "import sys; from pathlib import Path; from amor.experiment import jobs; "
    study += f"job = jobs.Job('one', (sys.executable, '-c', {code!r}), Path({str(log)!r})); "
    study += "jobs.run([job], 1, 1, jobs.JobObserver(), lambda job: True)"
    parent = subprocess.Popen([sys.executable, "-c", study])

    def wait_for(text):
        began = time.monotonic()
        while not log.is_file() or log.read_text() != text:
            assert time.monotonic() - began < 120, log.read_text()
            time.sleep(0.05)

    wait_for("begun\n")
    parent.kill()
    parent.wait()
    wait_for("begun\nsaved\n")


# numbers


def test_the_help_of_studies_names_no_study_that_is_not_there():
    named = re.findall(r"amor study (\S+)", study_verb.__doc__)
    assert named and {name for name in named if not name.endswith(".toml")} <= set(plans.names())
    parser = Parser()
    study_verb.arguments(parser)
    (words,) = (each.help for each in parser._actions if each.dest == "study")
    assert words.partition("one of: ")[2].split(", ") == plans.names()


def test_the_error_of_a_mean_over_seeds_counts_their_windows_and_their_spread():
    """Seeds share their windows, so only the error of seeds shrinks with more of them."""
    assert pooled_error([(1.0, 0.3)]) == 0.3
    assert pooled_error([(1.0, 0.3)] * 9) == pytest.approx(0.3)
    assert pooled_error([(1.0, 0.3), (1.8, 0.3)]) == pytest.approx((0.3**2 + 0.4**2) ** 0.5)


def test_an_error_counts_windows_and_seeds():
    chance = np.random.default_rng(0)
    level, seed, window = 3.0, chance.normal(0, 0.1, (4, 1)), chance.normal(0, 1.0, (1, 50))
    a, b = (
        Grid((1, 2, 3, 4), level + seed + window),
        Grid((4, 3, 2), level + 0.5 + seed[[3, 2, 1]] + window),
    )
    assert a.error == pytest.approx(
        (window.std(ddof=1) ** 2 / 50 + seed.std(ddof=1) ** 2 / 4) ** 0.5
    )
    gap = a.ahead(b)
    assert gap.size == pytest.approx(0.5) and gap.error < 1e-12 and gap.clear, (
        "what moves both alike is no error of the difference"
    )
    assert Grid((1,), window).error == pytest.approx(window.std(ddof=1) / 50**0.5)
    assert a.ahead(Grid((9,), window)) is None


def test_the_learning_rate_that_is_shown_is_the_best_that_most_seeds_have(tmp_path):
    losses = {
        (0.1, 1): 2.0,
        (0.1, 2): 3.0,
        (0.2, 1): 2.4,
        (0.2, 2): 2.5,
        (0.4, 1): 1.0,
    }  # the last one failed with seed 2
    runs = []
    for (lr, seed), nll in losses.items():
        run = Run(tmp_path / f"{lr}-{seed}")
        run.make()
        for step, value in ((5, 0.0), (9, nll)):
            valid = Valid(nll=value, perplexity=1.0, tokens=1)
            run.measured(Evaluated(step=step, valid=valid, timing=EvalTiming(seconds=0.0)))
        planned = PlannedRun(row="a", folder="f", seed=seed, lr=lr, recipe="r", changes=(), steps=9)
        runs.append(StudyRun(planned, run))
    assert best_learning_rates(runs) == {"a": 0.2}
    assert (
        best_learning_rates(runs[:2]) == {"a": 0.1}
        and best_learning_rates(runs[-1:]) == {"a": 0.4}
        and best_learning_rates([]) == {}
    )


# tables of what was found


def invented(folder, data, found, **keys):
    """A study of invented findings: (row, seed, kind) -> what was found."""
    tree = {
        "title": "t",
        "runs": [{"name": "a", "model": "mamba2"}, {"name": "b"}],
        "seeds": [1, 2],
        "set": {"steps": 1},
    }
    plan = plans.plan(typed.convert(Study, tree | keys, "here"), "invented", str(data), folder)
    plans.begin(plan)
    for planned in plan.runs:
        for kind in plan.study.measurements():
            if (one := found.get((planned.row, planned.seed, kind))) is not None:
                path = judging.file_of(plan.run(planned), kind)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(
                    typed.text(
                        Measurement(kind=kind, fingerprint="f", seconds=3.0, result=typed.tree(one))
                    )
                )
    return plan


def losses(*windows, context=8):
    data = TextSource(
        source="somewhere",
        windows=len(windows),
        context=context,
        tokens=len(windows) * context,
        documents="joined",
    )
    return LossResult(nll=statistics.mean(windows), se=0.0, windows=windows, fire=(), data=data)


def cells_of(folder):
    table = make_tables(results.read(folder))[0]
    return {line.name: dict(zip(table.columns, line.cells)) for line in table.lines}, table.notes


def test_a_table_names_what_it_lacks_and_no_seed_that_it_has_not(prepared, tmp_path):
    whole = {("a", 1, "loss"): losses(1.0, 2.0), ("b", 1, "loss"): losses(1.0, 2.0)}
    sizes = {
        (row, seed, "size"): ModelSize(parameters=1, flops=1.0, state_bytes=1.0)
        for row in "ab"
        for seed in (1, 2)
    }
    invented(tmp_path, prepared, whole | sizes, lr=[1e-3])
    notes = cells_of(tmp_path)[1]
    assert {"missing: a: seed 2 (loss)", "missing: b: seed 2 (loss)"} <= set(notes)
    assert (
        "1 steps; seeds 1; 1 thread per run" in notes
        and "errors: of windows alone, for there is one seed" in notes
    )
    assert any("chosen on windows of the same held-out split" in note for note in notes)


def test_nothing_of_the_losses_figure_is_cut_off_beside_long_names(prepared, tmp_path):
    pytest.importorskip("matplotlib")
    name = "amor-gated-deltanet-classic"
    rows = [{"name": name}, {"name": "b"}]
    invented(
        tmp_path,
        prepared,
        {(name, 1, "loss"): losses(4.4, 4.5), ("b", 1, "loss"): losses(5.2, 5.3)},
        runs=rows,
    )
    drawing = figures.draw("losses", results.read(tmp_path))
    paper, drawn = drawing.bbox_inches, drawing.get_tightbbox()
    assert (
        paper.x0 <= drawn.x0
        and drawn.x1 <= paper.x1
        and paper.y0 <= drawn.y0
        and drawn.y1 <= paper.y1
    )


def test_rows_are_compared_with_those_of_the_same_axes_and_the_same_text(prepared, tmp_path):
    level = {("a", 8): 5.0, ("a", 16): 4.0, ("b", 8): 4.5, ("b", 16): 1.0}
    found = {
        (f"{name}, context = {context}", seed, "loss"): losses(mean, mean + 1, context=context)
        for (name, context), mean in level.items()
        for seed in (1, 2)
    }
    invented(tmp_path, prepared, found, axes={"context": [8, 16]}, baseline="a")
    cells, _ = cells_of(tmp_path)
    over = {row: each["loss - a's"] and each["loss - a's"].value for row, each in cells.items()}
    assert list(over.values()) == [None, None, -0.5, -3.0]
    assert not any(each["loss"].best for each in cells.values()), (
        "windows of other contexts are no match"
    )
    assert Grid((1,), np.zeros((1, 3)), "x").ahead(Grid((1,), np.ones((1, 3)), "y")) is None


def test_a_gate_that_aims_at_no_rate_is_a_point_of_the_frontier(prepared, tmp_path):
    def rates(*policies):
        told = tuple(
            RatePolicy(name=n, rate=r, fire=(1.0,), nll=v, windows=(v, v)) for n, r, v in policies
        )
        return RatesResult(gate="g", data=losses(1.0, 1.0).data, policies=told, notes=())

    always = rates(("never", None, 3.0), ("as it is", None, 2.0), ("random", 0.1, 2.5))
    aims = rates(("never", None, 3.0), ("as it is", None, 2.0), ("gate", 0.1, 2.25))
    judge = {"rates": {"rates": [0.1]}}
    invented(
        tmp_path,
        prepared,
        {("a", 1, "rates"): always, ("b", 1, "rates"): aims},
        judge=judge,
        tables=["frontier"],
    )
    assert [
        (name, rate, grid.mean) for name, _, rate, grid in frontier_points(results.read(tmp_path))
    ] == [
        ("a", None, 2.0),
        ("b at 10 %", 0.1, 2.25),
    ]


def test_the_time_to_go_counts_judgements_of_one_learning_rate(prepared, tmp_path):
    plan = invented(tmp_path, prepared, {}, lr=[1e-3, 2e-3, 4e-3], judge={"loss": {}})
    runs = [RunStatus(planned, planned.steps, ("loss",)) for planned in plan.runs]
    done = runs.pop(0)
    path = judging.file_of(plan.run(done.planned), "loss")
    path.parent.mkdir(parents=True)
    path.write_text(typed.text(Measurement(kind="loss", fingerprint="f", seconds=3.0, result={})))
    left = Estimator(plan, lambda: 1.0).left(
        [RunStatus(done.planned, done.step, ()), *runs], at_once=1
    )
    assert left.judge == 3 * 3.0, "two rows of two seeds, of which one is judged"


def test_gates_fire_on_exactly_the_share_asked_for():
    model = small("amor-mamba2")
    reader = PolicyEvaluator(model, cut(tokens(3, 21)), own_gates(model))
    fire = reader.top_fraction(0.3)
    assert fire.flatten(1).sum(1).tolist() == [18, 18, 18]
    for k, gate in enumerate(reader.gates):
        mine = reader.run(
            lambda here, k=k, g=gate: [g if n == k else told(fire[n][here]) for n in range(3)]
        )
        assert mine.score[k][fire[k]].min() >= mine.score[k][~fire[k]].max()


def told(marks):
    from amor.judge.gates import ForcedGate

    return ForcedGate(marks)


def test_gates_of_decode_meet_a_rate_on_the_text_they_read():
    model, ids = small("amor-mamba2"), tokens(1, 50)[0].tolist()
    for rate, fired in ((0.0, 0), (0.3, 6), (1.0, 20)):
        gates = meet_rate(model, [aimed(gate, 0.5) for gate in own_gates(model)], rate, ids, 30)
        found = join_chunks(run_windows(model, cut(torch.tensor([[*ids, 0]])), gates=gates)).fire
        assert found[:, 0, 30:].sum(1).tolist() == [fired] * 3
