"""Laws of evaluation tables: only what is clear is bold, only what was asked alike is
compared, a broken file is one line."""

import json
import re
import statistics

import numpy as np
import pytest
from evaluations import LONG, drawn, evaluated, extrapolated, fits_a_column, folders, needles

from amor.cli import main
from amor.errors import AmorError
from amor.eval.tasks import SUITES, suite
from amor.study import eval_tables, evals, figures, paper
from amor.study import table as printing
from amor.study.compare import compare
from amor.study.paired import Gap, Scores, gap, mean_gap, resampled


@pytest.fixture
def root(tmp_path):
    folders(tmp_path)
    return tmp_path


def asked(*folders, **more):
    return eval_tables.TableRequest(tuple(folders), **more)


def one(name, *folders, **more):
    return next(eval_tables.tables(name, asked(*folders, **more)))


def cell(table, row, column):
    line = next(line for line in table.lines if line.name == row)
    return line.cells[table.columns.index(column)]


def piqa(folder, values, **more):
    return evaluated(folder, "common-sense", {"piqa": {"acc": values}}, **more)


def answered(capsys, *words):
    """The one line that a wrong command is answered with."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


# the paper


@pytest.mark.parametrize(
    "name", ["common_sense", "ablation_440m", "ablation_common_sense_1p5b", "depth_k", "longbench"]
)
def test_the_paper_s_averages_are_the_means_of_its_columns(name):
    table = paper.tables()[name]
    for row in table.rows:
        values = dict(zip(table.columns, row.values, strict=True))
        kept = [
            v
            for key, v in values.items()
            if key != "avg" and not key.endswith(("ppl", "perplexity"))
        ]
        assert len(kept) == (14 if name == "longbench" else 8)
        digits = 1 if name in ("common_sense", "longbench", "ablation_common_sense_1p5b") else 2
        # every number is rounded, so a mean of rounded ones may miss the
        # rounded mean by a whole last digit
        assert values["avg"] == pytest.approx(statistics.mean(kept), abs=10**-digits + 1e-9), (
            row.model
        )


def test_every_number_of_the_paper_s_tables_is_there():
    found = {name: (len(table.rows), len(table.columns)) for name, table in paper.tables().items()}
    assert found["common_sense"] == (24, 11)
    assert found["retrieval_niah"] == (8, 15)
    assert found["longbench"] == (8, 15)
    assert found["depth_k"] == (12, 9)
    assert all(
        len(row.values) == len(table.columns)
        for table in paper.tables().values()
        for row in table.rows
    )


def test_every_column_has_its_numbers_in_the_paper():
    for name in SUITES:
        known = suite(name)
        keys = {column.paper for column in known.columns if column.paper}
        assert not keys - set(paper.tables()[known.table].columns if known.table else ())


def test_a_model_of_the_paper_stands_once_among_the_ablations():
    models = list(paper.rows(("common_sense", "ablation_440m", "depth_k"), "440M"))
    assert len(models) == 8 + 6 + 2
    assert not [name for name in models if "K=3" in name]


# pairing


def test_bold_needs_two_errors_of_the_paired_difference(tmp_path):
    """120 documents, hard ones hard for both: ahead on 8 of them is clear in pairs, though both
    errors together are 6 points."""
    hard = [float(n % 2) for n in range(120)]
    ahead = [1.0 if n < 16 else value for n, value in enumerate(hard)]
    piqa(tmp_path / "a", ahead, name="a")
    piqa(tmp_path / "b", hard, name="b")
    table = one("common-sense", tmp_path / "a", tmp_path / "b")
    first, second = cell(table, "a", "PIQA"), cell(table, "b", "PIQA")
    assert first.best and not second.best
    assert first.value - second.value == pytest.approx(100 * 8 / 120)
    assert (
        first.value - second.value < 2 * (first.error**2 + second.error**2) ** 0.5
    )  # unpaired it would not be clear


def test_a_lead_that_only_unpaired_errors_would_call_clear_is_not_bold(tmp_path):
    """Where one is right exactly when the other is wrong, the difference is less sure than two
    unrelated scores would make it."""
    right = [1.0] * 116 + [0.0] * 92
    piqa(tmp_path / "a", right, name="a")
    piqa(tmp_path / "b", [1 - value for value in right], name="b")
    table = one("common-sense", tmp_path / "a", tmp_path / "b")
    first, second = cell(table, "a", "PIQA"), cell(table, "b", "PIQA")
    assert first.value - second.value > 2 * (first.error**2 + second.error**2) ** 0.5
    assert not first.best


def test_bold_is_ahead_of_every_other_row(tmp_path):
    hard = [float(n % 2) for n in range(100)]
    better = [1.0 if n < 40 else value for n, value in enumerate(hard)]
    piqa(tmp_path / "a", better, name="a")
    piqa(tmp_path / "b", [*better[:-1], 0.0], name="b")  # all but as good
    piqa(tmp_path / "c", hard, name="c")
    table = one("common-sense", *(tmp_path / name for name in "abc"))
    assert not any(c.best for line in table.lines for c in line.cells if c)
    assert cell(one("common-sense", tmp_path / "a", tmp_path / "c"), "a", "PIQA").best


def test_a_row_alone_is_not_bold(root):
    assert not any(
        c.best for line in one("common-sense", root / "a").lines for c in line.cells if c
    )


def test_without_samples_nothing_is_bold_and_the_table_says_so(tmp_path):
    piqa(tmp_path / "a", [1.0] * 50, name="a", samples=False)
    piqa(tmp_path / "b", [0.0] * 50, name="b")
    table = one("common-sense", tmp_path / "a", tmp_path / "b")
    assert not cell(table, "a", "PIQA").best
    assert "not compared, for want of numbers per document: PIQA" in table.notes


def test_of_perplexities_the_smaller_is_better(root):
    table = one("common-sense", root / "a", root / "b")
    assert cell(table, "amor-a", "LAMB ppl").value < cell(table, "amor-b", "LAMB ppl").value
    assert cell(table, "amor-a", "LAMB ppl").best
    assert not cell(table, "amor-b", "LAMB ppl").best


def test_cells_at_the_floor_are_marked_and_a_floor_is_untrained(root, capsys):
    table = one("common-sense", root / "a", root / "b", floor=root / "untrained")
    assert cell(table, "amor-b", "Avg").floor
    assert not cell(table, "amor-a", "Avg").floor
    floor = next(line for line in table.lines if line.kind == "floor")
    assert not any(c.floor or c.best for c in floor.cells)
    assert "a floor is a model that was trained on 0" in answered(
        capsys, "table", root / "a", "--floor", root / "b"
    )


def test_a_gap_is_the_mean_of_differences_and_its_error():
    ids = np.arange(4)
    found = gap(Scores(ids, np.array([1.0, 1, 0, 1])), Scores(ids, np.array([0.0, 1, 0, 0])))
    assert (found.size, found.error) == (0.5, pytest.approx((1 / 3) ** 0.5 / 2))
    assert gap(Scores(ids[:1], np.ones(1)), Scores(ids[:1], np.zeros(1))) is None


def test_the_error_of_an_average_of_tasks_is_that_of_independent_tasks():
    """Root of the sum of squares over their number: n equal errors shrink by sqrt(n)."""
    assert mean_gap([Gap(1.0, 3.0), Gap(3.0, 4.0)]) == Gap(2.0, 2.5)
    assert mean_gap([Gap(1.0, 2.0)] * 16) == Gap(1.0, 0.5)


# tables


def test_the_average_is_the_mean_of_eight_with_its_error(root):
    table = one("common-sense", root / "a")
    eight = table.lines[0].cells[1:9]
    assert table.columns[1:9] == ("LAMB", "HSwag", "PIQA", "ARC-E", "ARC-C", "WinoG", "OBQA", "TQA")
    average = cell(table, "amor-a", "Avg")
    assert average.value == pytest.approx(statistics.mean(c.value for c in eight))
    assert average.error == pytest.approx(sum(c.error**2 for c in eight) ** 0.5 / 8)


def test_an_average_is_there_only_where_every_column_is(tmp_path):
    scores = {f"longbench_{name}": {"score": [0.1, 0.3, 0.2]} for name in LONG}
    evaluated(tmp_path / "a", "longbench", scores, name="a")
    evaluated(tmp_path / "b", "longbench", dict(list(scores.items())[1:]), name="b")
    table = one("longbench", tmp_path / "a", tmp_path / "b")
    assert cell(table, "a", "Avg").value == pytest.approx(20)
    assert cell(table, "b", "Avg") is None
    assert cell(table, "b", "NQA") is None
    assert re.search(r"^b +- ", printing.as_text(table), re.M)


def test_a_missing_metric_is_a_dash(tmp_path):
    file = piqa(tmp_path / "a", [1.0, 0.0])
    tree = json.loads(file.read_text())
    del tree["results"]["piqa"]["acc,none"]
    file.write_text(json.dumps(tree))
    assert cell(one("common-sense", tmp_path / "a"), "a", "PIQA") is None


def test_lengths_that_were_not_asked_for_are_dropped(tmp_path):
    file = needles(tmp_path / "a", "a", 0.9, lengths=(1024, 2048))
    tree = json.loads(file.read_text())
    tree["results"]["niah_single_1"]["4096,none"] = -1
    file.write_text(json.dumps(tree))
    table = one("niah", tmp_path / "a")
    assert cell(table, "a", "S1 4K") is None
    assert cell(table, "a", "S1 1K").value > 50


def test_documents_of_another_length_do_not_count(tmp_path):
    """The harness writes -1 for 4,096 into documents of other lengths; errors come from
    documents where it tells none."""
    needles(tmp_path / "a", "a", 0.9, count=20)
    column = next(c for c in suite("niah").columns if c.title == "S2 4K")
    judged = evals.opened(tmp_path / "a", "niah")
    scores = judged.documents(column)
    assert len(scores.ids) == 20
    assert set(scores.values.tolist()) <= {0.0, 1.0}
    assert judged.score(column)[1] == pytest.approx(np.std(scores.values, ddof=1) / 20**0.5)


def test_needles_have_the_columns_that_were_measured(tmp_path):
    needles(tmp_path / "a", "a", 0.9, lengths=(256, 1024))
    table = one("niah", tmp_path / "a")
    assert table.columns[:4] == ("S1 256", "S1 1K", "S1 2K", "S1 4K")
    assert cell(table, "Transformer", "S1 256") is None
    assert any(
        "true tokens of prompts" in note and "niah_single_1/256 230" in note for note in table.notes
    )


def test_the_paper_s_retrieval_stands_under_whichever_prompts_were_used(tmp_path):
    evaluated(
        tmp_path / "a",
        "retrieval",
        {"cloze_swde": {"contains": [1.0, 0.0]}, "fda": {"contains": [1.0, 0.0]}},
        name="a",
    )
    table = one("retrieval", tmp_path / "a")
    assert table.columns == ("SQuAD", "FDA", "SWDE cloze", "TQA cloze", "NQ cloze", "DROP cloze")
    assert cell(table, "Transformer", "SWDE cloze").value == 54.5


def test_rows_of_the_paper_are_those_of_the_scale(root):
    table = one("common-sense", root / "a", scale="1.5B")
    assert cell(table, "AMOR-Mamba2", "Avg").value == 45.8
    assert cell(one("common-sense", root / "a"), "AMOR-Mamba2", "Avg").value == 35.8
    assert "AMOR-classic Mamba2 (K=1)" in [
        line.name for line in one("common-sense", root / "a", ablations=True).lines
    ]
    retrieval = one("retrieval", root / "a", scale="180M")
    assert {line.kind for line in retrieval.lines} == {"ours"}
    assert "paper: no retrieval at 180M, only at 1.5B" in retrieval.notes


def test_gates_closed_and_open_are_rows_with_their_firing_rates(root):
    table = one("common-sense", root / "a", root / "b", gates=True)
    assert [line.name for line in table.lines[:4]] == [
        "amor-a",
        "amor-a, closed",
        "amor-a, open",
        "amor-b",
    ]
    assert [
        cell(table, name, "fires").value for name in ("amor-a", "amor-a, closed", "amor-a, open")
    ] == [0.35, 0.0, 1.0]


def test_notes_tell_where_numbers_come_from(tmp_path):
    piqa(
        tmp_path / "a",
        [1.0, 0.0],
        name="a",
        limit=2,
        skipped={"hellaswag": "no\nhellaswag.jsonl"},
        tokens=None,
    )
    notes = one("common-sense", tmp_path / "a").notes
    asked = "2 documents (at most 2 per task); gates model, likelihood; lm-eval 0.4.13"
    fired = "fires in prefill 0.300 0.400; fires in target 0.300 0.400"
    assert notes[0] == f"a: tokens trained on not known; 1,000 parameters; {asked}; {fired}"
    assert notes[1] == "skipped: hellaswag (no hellaswag.jsonl)"


def test_two_models_of_one_name_are_told_apart(tmp_path):
    for name in "xy":
        piqa(tmp_path / name, [1.0, 0.0], name="same")
    names = [line.name for line in one("common-sense", tmp_path / "x", tmp_path / "y").lines[:2]]
    assert names == [f"same ({tmp_path / 'x'})", f"same ({tmp_path / 'y'})"]


def test_lengths_are_rows_and_models_columns_of_curves(root):
    found = list(eval_tables.tables("length-extrapolation", asked(root / "a", root / "b")))
    assert len(found) == 2
    assert found[0].columns == ("amor-a", "amor-b")
    assert found[0].lines[-1].name == "20,480"
    assert found[0].lines[-1].cells[1].value == pytest.approx(12 + 1.2 * 16)
    assert found[0].lines[-1].cells[1].error == 0.6
    bucket = one("length-extrapolation", root / "a", bucket=True)
    assert bucket.lines[-1].cells[0].value == pytest.approx(1.3 * (12 + 0.2 * 16))


def test_perplexities_are_shown_as_they_are_and_never_bold(tmp_path):
    for name, value in (("a", 20.5), ("b", 31.0)):
        file = evaluated(tmp_path / name, "perplexity", {}, name=name)
        changed(
            file,
            lambda t, v=value: t["results"].update(
                perplexity={"perplexity,none": v, "bits_per_byte,none": 1.25}
            ),
        )
    table = one("perplexity", tmp_path / "a", tmp_path / "b")
    assert [c.value for c in table.lines[0].cells] == [20.5, 1.25]
    assert not table.lines[0].cells[0].best
    assert cell(table, "Transformer", "perplexity").value == 31.96
    assert re.search(r"^a +20\.50 +1\.250$", printing.as_text(table), re.M)


# what may not stand side by side


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"sha256": "e" * 64},
            "amor.data.piqa is ffffffffffff in one and eeeeeeeeeeee in the other",
        ),
        ({"limit": 7}, "amor.settings.limit is none in one and 7 in the other"),
        ({"harness": "0.4.9"}, "amor.settings.harness is 0.4.13 in one and 0.4.9 in the other"),
    ],
)
def test_what_was_asked_differently_is_refused(tmp_path, capsys, change, named):
    piqa(tmp_path / "a", [1.0, 0.0], name="a")
    piqa(tmp_path / "b", [1.0, 0.0], name="b", **change)
    assert named in answered(capsys, "table", tmp_path / "a", tmp_path / "b")
    assert named in answered(capsys, "compare", tmp_path / "a", tmp_path / "b")


def test_other_documents_are_refused(tmp_path, capsys):
    piqa(tmp_path / "a", [1.0, 0.0, 1.0], name="a")
    piqa(tmp_path / "b", [1.0, 0.0, 1.0], name="b")
    file = tmp_path / "b" / "samples_common-sense_piqa.jsonl"
    file.write_text(file.read_text().replace('"doc_id": 2', '"doc_id": 9'))
    said = answered(capsys, "table", tmp_path / "a", tmp_path / "b")
    assert "2 documents stand in only one of them (doc_id 2 is the first)" in said


# printing


def awkward(tmp_path):
    name = "a_b & 50% $x {y} #1 ~^\\ |*\033[31m\n"
    piqa(tmp_path / "a", [1.0] * 9 + [0.0], name=name)
    piqa(tmp_path / "b", [0.0] * 10, name="b")
    return one("common-sense", tmp_path / "a", tmp_path / "b")


def test_latex_escapes_what_latex_reads(tmp_path):
    text = printing.as_latex(awkward(tmp_path))
    assert (
        r"a\_b \& 50\% \$x \{y\} \#1 \textasciitilde{}\textasciicircum{}\textbackslash{} |*" in text
    )
    assert r"\textbf{90.0}$\pm$10.0" in text
    assert "\033" not in text
    body = [
        line
        for line in text.splitlines()
        if line.endswith(r"\\") and not line.startswith(r"\multicolumn")
    ]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {10}


def test_markdown_has_as_many_cells_in_every_row(tmp_path):
    text = printing.as_markdown(awkward(tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {12}
    assert "**90.0**±10.0" in text


def test_text_is_aligned_and_bold_only_on_a_terminal(tmp_path):
    table = awkward(tmp_path)
    assert "*90.0*±10.0" in printing.as_text(table)
    assert "\033" not in printing.as_text(table)
    assert "\033[1m90.0\033[0m±10.0" in printing.as_text(table, terminal=True)
    shown = re.sub(r"\033\[\dm", "", printing.as_text(table, terminal=True)).splitlines()
    assert len({len(line) for line in shown[1:5]}) == 1


def test_marks_are_explained_where_they_stand(root):
    plain = printing.as_text(one("common-sense", root / "a"))
    assert "±: one" in plain and "two paired" not in plain
    marked = printing.as_text(one("common-sense", root / "a", root / "b", floor=root / "untrained"))
    assert f"*: {printing.BEST}" in marked and f"=: {printing.FLOOR}" in marked


def test_a_table_ends_with_its_json(root, capsys):
    assert main(["table", str(root / "a"), str(root / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    titles = [table["title"].split(",")[0] for table in found["tables"]]
    assert titles == [
        "common-sense",
        "retrieval",
        "niah",
        "length-extrapolation",
        "length-extrapolation",
    ]
    assert found["tables"][0]["lines"][0]["cells"][-1]["best"] is True


# comparing


def test_a_small_comparison_by_hand():
    """Three documents, differences 1, 0, -1: of the 27 draws 10 favour A,
    10 favour B, and 7 are ties."""
    ids = np.arange(3)
    drawn = resampled(
        Scores(ids, np.array([1.0, 1, 0])),
        Scores(ids, np.array([0.0, 1, 1])),
        200_000,
        np.random.default_rng(1),
    )
    assert set(np.round(drawn * 3).astype(int).tolist()) == {-3, -2, -1, 0, 1, 2, 3}
    assert (drawn > 1e-9).mean() == pytest.approx(10 / 27, abs=0.005)
    assert (np.abs(drawn) < 1e-9).mean() == pytest.approx(7 / 27, abs=0.005)
    assert (drawn == 1).mean() == pytest.approx(1 / 27, abs=0.002)


def test_a_comparison_is_the_same_for_the_same_seed_and_in_mirror(root):
    a, b = (evals.opened(root / name, "common-sense") for name in "ab")
    found = compare(a, b, 500, seed=3)
    assert found == compare(a, b, 500, seed=3)
    assert found.tasks != compare(a, b, 500, seed=4).tasks
    for mine, theirs in zip(
        [*found.tasks, found.average], [*(back := compare(b, a, 500, seed=3)).tasks, back.average]
    ):
        assert mine.difference == pytest.approx(-theirs.difference)
        assert mine.better == pytest.approx(1 - theirs.better)
        assert (mine.low, mine.high) == (pytest.approx(-theirs.high), pytest.approx(-theirs.low))


def test_the_interval_of_a_comparison_is_that_of_the_paired_error(tmp_path):
    rng = np.random.default_rng(0)
    hard = np.array(drawn(rng, 400, 0.5))
    better = np.where(rng.random(400) < 0.1, 1.0, hard)
    for name, values in (("a", better), ("b", hard)):
        piqa(tmp_path / name, values.tolist(), name=name)
    (found,) = compare(*(evals.opened(tmp_path / name, "common-sense") for name in "ab")).tasks
    ids = np.arange(400)
    expected = gap(Scores(ids, better), Scores(ids, hard))
    assert found.difference == pytest.approx(100 * expected.size)
    assert (found.high - found.low) / 2 == pytest.approx(196 * expected.error, rel=0.06)
    assert found.better > 0.99


def test_the_average_of_a_comparison_is_of_all_accuracies(root):
    found = compare(*(evals.opened(root / name, "common-sense") for name in "ab"), 300)
    assert found.average.name == "average of 8"
    assert found.average.difference == pytest.approx(
        statistics.mean(t.difference for t in found.tasks if t.metric == "acc")
    )
    assert found.average.high - found.average.low < min(
        t.high - t.low for t in found.tasks if t.metric == "acc"
    )


def test_a_model_beside_itself_is_neither_better_nor_worse(root, capsys):
    assert (
        main(
            [
                "compare",
                str(root / "a"),
                str(root / "a"),
                "--suite",
                "common-sense",
                "--samples",
                "50",
                "--json",
            ]
        )
        == 0
    )
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["comparisons"]
    assert {(t["difference"], t["low"], t["high"], t["better"]) for t in found["tasks"]} == {
        (0.0, 0.0, 0.0, 0.5)
    }


def test_a_smaller_perplexity_is_better_in_a_comparison(root):
    found = compare(*(evals.opened(root / name, "common-sense") for name in "ab"), 100)
    perplexity = next(t for t in found.tasks if t.metric == "perplexity")
    assert perplexity.difference < 0 and perplexity.better == 1.0


def test_files_are_compared_too(root, capsys):
    files = [str(root / "a" / name) for name in ("common-sense.json", "common-sense.closed.json")]
    assert main(["compare", *files, "--samples", "50"]) == 0
    assert "B = amor-a, closed" in capsys.readouterr().out
    said = answered(capsys, "compare", files[0], root / "a" / "niah.json")
    assert "is of the suite common-sense" in said


# broken files


def changed(file, change):
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


BROKEN = {
    "not JSON": (lambda f: f.write_text("{"), "not JSON"),
    "no key amor": (lambda f: changed(f, lambda t: t.pop("amor")), "amor"),
    "a text for a count": (
        lambda f: changed(f, lambda t: t["amor"]["model"].update(parameters="many")),
        "amor.model.parameters",
    ),
    "another version": (lambda f: changed(f, lambda t: t["amor"].update(version=9)), "version"),
    "results a list": (lambda f: changed(f, lambda t: t.update(results=[])), "results"),
    "another suite": (
        lambda f: changed(f, lambda t: t["amor"].update(suite="niah")),
        "which is a file named niah.json",
    ),
    "other blocks": (
        lambda f: changed(f, lambda t: t["amor"]["gates"]["piqa"]["target"].update(fires=[1])),
        "amor.gates.piqa.target.fires: 1 blocks, where others have 2",
    ),
    "more fires than tokens": (
        lambda f: changed(f, lambda t: t["amor"]["gates"]["piqa"]["target"].update(fires=[1, 101])),
        "amor.gates.piqa.target.fires: 101 of 100 tokens",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_line(name, tmp_path, capsys):
    broken, named = BROKEN[name]
    file = piqa(tmp_path / "a", [1.0, 0.0])
    broken(file)
    said = answered(capsys, "table", tmp_path / "a", "--suite", "common-sense")
    assert str(file) in said and named in said


BROKEN_SAMPLES = {
    "not JSON": ('{"doc_id": 0, "acc": 1.0}\n{\n', ":2: not JSON"),
    "no id": (
        '{"doc_id": 0, "acc": 1.0}\n{"acc": 0.0}\n',
        ":2: doc_id: expected int of 64 bits, not None",
    ),
    "an id of 65 bits": (
        f'{{"doc_id": {2**63}, "acc": 1.0}}\n',
        f":1: doc_id: expected int of 64 bits, not {2**63}",
    ),
    "a number beyond floats": (
        f'{{"doc_id": 0, "acc": {10**400}}}\n',
        ":1: acc: expected a number, not '1000",
    ),
    "an id twice": (
        '{"doc_id": 0, "acc": 1.0}\n{"doc_id": 0, "acc": 0.0}\n',
        ":2: doc_id 0 a second time",
    ),
    "no number": (
        '{"doc_id": 0, "acc": 1.0}\n{"doc_id": 1, "acc": "yes"}\n',
        ":2: acc: expected a number, not 'yes'",
    ),
    "a list": ("[]\n", ":1: expected object"),
    "of another evaluation": (
        '{"doc_id": 0, "acc": 1.0}\n{"doc_id": 1, "acc": 1.0}\n',
        "they are of two evaluations",
    ),
}


@pytest.mark.parametrize("name", BROKEN_SAMPLES)
def test_broken_samples_are_one_line(name, tmp_path, capsys):
    text, named = BROKEN_SAMPLES[name]
    for folder in "ab":
        piqa(tmp_path / folder, [1.0, 0.0], name=folder)
    (tmp_path / "a" / "samples_common-sense_piqa.jsonl").write_text(text)
    for verb in ("table", "compare"):
        said = answered(capsys, verb, tmp_path / "a", tmp_path / "b")
        assert "samples_common-sense_piqa.jsonl" in said and named in said


def test_curves_of_uneven_lengths_are_refused(tmp_path, capsys):
    file = extrapolated(tmp_path / "a", "a", 1)
    changed(file, lambda t: t["amor"]["curves"]["pg19"]["bucket"].pop())
    assert "amor.curves.pg19.bucket: 9 numbers for 10 lengths" in answered(
        capsys, "table", tmp_path / "a"
    )


def test_suites_are_those_that_all_have(root, capsys):
    assert "no suite that all have" not in answered(capsys, "table", root / "a", root / "nowhere")
    piqa(root / "c", [1.0, 0.0], name="c")
    needles(root / "d", "d", 0.5)
    assert "no suite that all have" in answered(capsys, "table", root / "c", root / "d")
    assert evals.shared_suites([root / "a", root / "c"]) == ["common-sense"]


def test_what_was_decoded_is_in_files_of_its_own(tmp_path, capsys):
    piqa(tmp_path / "a", [1.0, 0.0, 1.0], name="a")
    piqa(tmp_path / "a", [0.0, 0.0, 1.0], name="a", path="decode")
    assert main(["table", str(tmp_path / "a"), "--decode"]) == 0
    assert "33.3±33.3" in capsys.readouterr().out


# figures


@pytest.mark.parametrize(
    ("kind", "name", "panels"),
    [
        ("extrapolation", "length-extrapolation", 2),
        ("firing", "length-extrapolation", 4),
        ("niah", "niah", 2),
        ("accuracy", "common-sense", 1),
    ],
)
def test_every_figure_is_drawn(root, tmp_path, kind, name, panels):
    drawing = figures.draw(
        kind, eval_tables.read(name, asked(root / "a", root / "b", gates=kind == "accuracy"))
    )
    assert len(drawing.axes) == panels
    fits_a_column(drawing)
    assert figures.save(drawing, tmp_path / "figure.svg").stat().st_size > 1000


def test_accuracy_is_drawn_at_each_firing_rate(root):
    (axes,) = figures.draw(
        "accuracy", eval_tables.read("common-sense", asked(root / "a", root / "b", gates=True))
    ).axes
    line = next(line for line in axes.lines if line.get_label() == "amor-a")
    assert list(line.get_xdata()) == [0.0, 0.35, 1.0]
    table = one("common-sense", root / "a", gates=True)
    heights = [
        cell(table, name, "Avg").value for name in ("amor-a, closed", "amor-a", "amor-a, open")
    ]
    assert list(line.get_ydata()) == pytest.approx(heights)


def test_a_figure_of_nothing_is_refused(tmp_path):
    extrapolated(tmp_path / "a", "a", 1, blocks=0)
    with pytest.raises(AmorError, match="no firing rates"):
        figures.draw("firing", eval_tables.read("length-extrapolation", asked(tmp_path / "a")))
    evaluated(tmp_path / "b", "niah", {}, name="b")
    with pytest.raises(AmorError, match="no niah task"):
        figures.draw("niah", eval_tables.read("niah", asked(tmp_path / "b")))
