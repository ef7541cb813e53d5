"""Bars judge what a benchmark found as a file says: whole rounds, by the median of their ratios."""

import json
from pathlib import Path

import pytest

from amor.bench import machine, ops
from amor.bench.table import BenchmarkRow, BenchmarkTable
from amor.bench.timing import from_rounds
from amor.errors import AmorError
from benchmarks import bars
from benchmarks.__main__ import main

ROWS = {"ops": ["head", "product"], "decode": ["contexts"]}
SPEED = {"suite": "ops", "row": "head", "name": "speed", "at_least": 1.0}


def written(folder: Path, *entries: dict) -> str:
    """A file of bars; JSON writes texts and numbers as TOML does."""
    lines = [
        "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.items()) + "}"
        for entry in entries
    ]
    (folder / "bars.toml").write_text(f"bars = [{', '.join(lines)}]")
    return str(folder / "bars.toml")


def bar(**changes: object) -> bars.Bar:
    given = {"suite": "ops", "row": "head", "name": "speed", "kind": "at_least", "limit": 1.0}
    return bars.Bar(**given | changes)


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> BenchmarkRow:
    """The row that `python -m benchmarks ops` measures, without measuring anything."""
    table = BenchmarkTable("ops", quick=False)
    table.request("head")
    made = table.row("a row", "head", tokens=1)

    def run(args) -> dict:
        table.quick = args.quick
        return table.result()

    monkeypatch.setattr(ops, "run", run)
    monkeypatch.setattr(machine, "gemm_rate", lambda: 1.0)
    monkeypatch.setattr(machine, "bandwidth", lambda: 1.0)
    return made


def judged(row: BenchmarkRow, *limits: bars.Bar, **changes: object) -> list[str]:
    table = BenchmarkTable("ops", quick=False)
    table.request(row.name)
    table.rows.append(row)
    return [one.verdict for one in bars.compare(table.result() | changes, list(limits))]


def test_a_ratio_is_judged_by_the_median_of_its_rounds(row: BenchmarkRow) -> None:
    row.add_ratio("speed", from_rounds([2.0, 2.0, 2.0]), from_rounds([1.0, 2.5, 2.5]))
    assert row.ratios["speed"].best == 2 and row.ratios["speed"].median == 0.8
    assert judged(
        row, bar(), bar(limit=0.8), bar(kind="at_most", limit=0.8), bar(kind="at_most", limit=0.7)
    ) == [
        "MISSED",
        "met",
        "met",
        "MISSED",
    ]


def test_a_missed_bar_exits_with_1(
    row: BenchmarkRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row.numbers |= {"speed": 2.0, "memory, MB": 2.0}
    limits = [SPEED, {"suite": "ops", "row": "head", "name": "memory, MB", "at_most": 1}]
    words = [
        "ops",
        "--json",
        "--bars",
        written(tmp_path, *limits),
        "--out",
        str(tmp_path / "found.json"),
    ]
    assert main(words) == 1
    *told, found = capsys.readouterr().out.splitlines()
    assert (
        "  head, speed: 2 (≥ 1: met)" in told
        and told[-1] == "1 met, 1 MISSED, 0 not judged, 0 not measured"
    )
    assert json.loads(found) == json.loads((tmp_path / "found.json").read_text())
    assert (
        json.loads(found)["missed"] == ["head, memory, MB: 2 (≤ 1: MISSED)"]
        and not json.loads(found)["ok"]
    )
    assert [one["verdict"] for one in json.loads(found)["bars"]] == ["met", "MISSED"]
    row.numbers["memory, MB"] = 1.0
    assert main(words) == 0


def test_without_bars_nothing_is_judged(
    row: BenchmarkRow, capsys: pytest.CaptureFixture[str]
) -> None:
    row.numbers["speed"] = 0.0
    assert main(["ops", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ok"] and found["bars"] == found["missed"] == []


def test_a_quick_run_is_not_judged(
    row: BenchmarkRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row.numbers["speed"] = 0.0
    assert main(["ops", "--quick", "--bars", written(tmp_path, SPEED)]) == 0
    assert "head, speed: 0 (≥ 1: not judged)" in capsys.readouterr().out
    assert judged(row, bar(), clock="cpu seconds of one thread") == ["not judged"]
    assert judged(row, bar()) == ["MISSED"]


def test_a_bar_that_was_not_measured_is_named(
    row: BenchmarkRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row.numbers["sped"] = 2.0
    assert main(["ops", "--bars", written(tmp_path, SPEED), "--json"]) == 0
    *told, found = capsys.readouterr().out.splitlines()
    assert "  head, speed: - (≥ 1: not measured)" in told
    assert json.loads(found)["bars"][0]["verdict"] == "not measured"


def test_a_bar_about_what_was_not_asked_for_is_left_out(row: BenchmarkRow) -> None:
    row.numbers["speed"] = 2.0
    assert judged(row, bar(row="product"), bar(suite="peers")) == []
    assert judged(row, bar(scale="440m"), scale="180m") == []
    assert judged(row, bar(scale="440m"), scale="440m") == ["not measured"], (
        "the row is of no scale"
    )
    row.shape = {"scale": "440m"}
    assert judged(row, bar(scale="440m"), scale="440m") == ["met"]


def test_a_number_known_to_lie_beyond_another_is_judged_where_that_decides(
    row: BenchmarkRow,
) -> None:
    row.lower_bounds["speed"] = 100
    limits = [
        bar(kind=kind, limit=limit) for kind in ("at_most", "at_least") for limit in (100, 101)
    ]
    assert judged(row, *limits) == ["MISSED", "not judged", "met", "not judged"]


def test_a_number_that_is_none_does_not_meet_a_bar(row: BenchmarkRow) -> None:
    row.numbers["speed"] = float("nan")
    assert judged(row, bar(), bar(kind="at_most")) == ["MISSED", "MISSED"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"at_last": 2}, "no key 'at_last'; did you mean 'at_least'?"),
        ({"suite": "opps"}, "no suite 'opps'; did you mean 'ops'?"),
        ({"row": "heads"}, "no row 'heads'; did you mean 'head'?"),
        ({"scale": "440"}, "no scale '440'; did you mean '440m'?"),
        ({"at_most": 2}, "both at_least and at_most"),
        ({"at_least": None}, "neither at_least nor at_most"),
        ({"at_least": True}, "at_least: expected float | null, got bool"),
        ({"at_least": "1"}, "at_least: expected float | null, got str"),
        ({"name": None}, "missing required field name"),
        ({"name": 3}, "name: expected str, got int"),
    ],
)
def test_a_wrong_bar_is_refused_by_name(entry: dict, words: str, tmp_path: Path) -> None:
    given = {key: value for key, value in (SPEED | entry).items() if value is not None}
    with pytest.raises(AmorError) as refused:
        bars.load(written(tmp_path, SPEED, given), ROWS)
    assert (
        words in str(refused.value)
        and "bars[1]" in str(refused.value)
        and "\n" not in str(refused.value)
    )


@pytest.mark.parametrize(
    "text",
    [
        "bar = []",
        "",
        "bars = 3",
        "bars = [3]",
        "bars = [",
        "\xff",
        "bars = [{suite = 'ops', row = 'head', name = 'a', at_least = nan}]",
    ],
)
def test_a_file_that_holds_no_bars_is_refused_before_anything_is_measured(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "run", lambda _args: pytest.fail("measured"))
    (tmp_path / "bars.toml").write_text(text, encoding="latin-1")
    assert main(["ops", "--bars", str(tmp_path / "bars.toml")]) == 2
    assert main(["ops", "--bars", str(tmp_path / "nowhere.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_the_help_tells_of_bars(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["ops"], ["decode"], ["peers"]):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert "--bars" in capsys.readouterr().out
