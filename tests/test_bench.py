"""The benchmarks run, and record what they measured. How fast anything is, is not tested here."""

import io
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch

from amor.bench import machine, timing, train
from amor.bench.table import BenchmarkTable, print_table
from amor.bench.timing import alternate, from_rounds
from amor.cli import main
from amor.cli.bench import suites
from amor.models.build import build
from amor.presets import NAMES, preset
from amor.train.optim import shape
from amor.train.recipe import load
from benchmarks import bars, memory, peak, peer_models, steps
from benchmarks.__main__ import main as benchmark
from benchmarks.__main__ import rows_of_suites
from benchmarks.peak import extra_peak

BARS = Path(bars.__file__).with_name("bars.toml")
KINDS = ("numbers", "ratios", "lower_bounds")


def make_ceilings_small(patch: pytest.MonkeyPatch) -> None:
    """Ceilings of small matrices and arrays: their size does not matter here."""
    patch.setattr(machine, "GEMM_SIZE", 64)
    patch.setattr(machine, "READ_BYTES", 2**20)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    make_ceilings_small(monkeypatch)


# the suites as they run quickly; what is judged of them is in bars.toml
SUITES = {
    "ops": [],
    "peers": [],
    "train": [],
    "busy": [],
    "scoring": [],
    "memory": [],
    "savings": ["--contexts", "32"],
    "dense": [],
    "batch": ["--batches", "2", "--prefill", "8", "--weights", "float32,int4"],
    "decode": ["--contexts", "32,64", "--models", "mamba2-serial,amor-mamba2"],
}
# suite -> measurements that it makes at least
ROWS = {
    **{"ops": 13, "train": 1, "decode": 6, "batch": 8},
    **{"peers": 5, "busy": 2, "scoring": 1, "memory": 4, "savings": 1, "dense": 2},
}
# a quick run takes the step of one architecture, because each needs a process of its own and that takes seconds
EXEMPT = {
    ("memory", "training", f"GB at the peak, {name}") for name in NAMES if name != "amor-mamba2"
}


@pytest.fixture(scope="module")
def quickly() -> Callable[[str], dict]:
    """What a suite finds with --quick; each is run once."""

    @cache
    def run(suite: str) -> dict:
        if suite == "memory" and not peak.STATUS.exists():
            pytest.skip("this system does not report the memory of a process")
        told = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(told):
            make_ceilings_small(patch)
            words = [*SUITES[suite], "--quick", "--rounds", "1", "--bars", str(BARS), "--json"]
            assert benchmark([suite, *words]) == 0
        return json.loads(told.getvalue().splitlines()[-1])

    return run


@pytest.mark.parametrize(("suite", "rows"), list(ROWS.items()))
def test_every_row_carries_shapes_backends_times_and_numbers(
    suite: str, rows: int, quickly: Callable[[str], dict]
) -> None:
    found = quickly(suite)
    assert found["suite"] == suite and found["quick"] and found["ok"]
    assert {"cpu", "cores", "threads", "gemm_gflops", "read_gbs"} <= found["machine"].keys()
    assert {"scan", "delta", "head", "product"} <= found["kernels"].keys()
    assert len(found["rows"]) >= rows
    for row in found["rows"]:
        assert row["name"] in found["requested"] and row["what"] and row["shape"]
        assert row["times"] or row["numbers"] or row["lower_bounds"]
        for times in row["times"].values():
            assert times["best"] > 0 and times["rounds"] and times["median"] >= min(times["rounds"])
        for ratio in row["ratios"].values():
            assert ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["best"] > 0


@pytest.mark.parametrize(
    "suite", [suite for suite in SUITES if suite not in ("dense", "batch")]
)  # these have no bars
def test_every_bar_of_this_project_names_a_number_that_its_suite_finds(
    suite: str, quickly: Callable[[str], dict]
) -> None:
    found = quickly(suite)
    numbers = {
        (suite, row["name"], name) for row in found["rows"] for kind in KINDS for name in row[kind]
    }
    wanted = {
        (bar.suite, bar.row, bar.name)
        for bar in bars.load(BARS, rows_of_suites())
        if bar.suite == suite
    }
    assert wanted and wanted - numbers <= EXEMPT
    assert {
        bar["verdict"] for bar in found["bars"] if (suite, bar["row"], bar["name"]) not in EXEMPT
    } == {"not judged"}
    assert {
        bar["verdict"] for bar in found["bars"] if (suite, bar["row"], bar["name"]) in EXEMPT
    } <= {"not measured"}


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_has_our_parameters_between_two_whole_depths(name: str) -> None:
    ours = steps.parameters(build(preset(name, "tiny"), device="meta"))
    depth = peer_models.mamba2_depth(ours, 256, 4096)
    with torch.device("meta"):
        low, high = (
            steps.parameters(peer_models.mamba2(256, n, 4096))
            for n in (math.floor(depth), math.floor(depth) + 1)
        )
    assert low <= ours < high
    assert low + (depth - math.floor(depth)) * (high - low) == pytest.approx(ours)


def test_the_time_of_a_peer_is_read_off_between_two_depths() -> None:
    row = BenchmarkTable("peers", quick=True).row("training step")
    row.times |= {
        f"{steps.MAMBA2} x {n}": from_rounds(taken)
        for n, taken in ((5, (2.0, 1.0)), (6, (1.4, 3.0)))
    }
    between = steps.at_depth(row, 5.25)
    assert between.rounds == pytest.approx((1.85, 1.5)), "round by round"
    assert between.best == pytest.approx(1.1), "and by the bests"
    assert steps.at_depth(row, 6.0).best == pytest.approx(1.4)


def test_products_are_counted_whoever_multiplies() -> None:
    row = train.throughput(
        BenchmarkTable("train", quick=True), 1, batch=2, micro_batch=2, context=16
    )
    model = build(preset("amor-mamba2", "tiny"), device="meta")
    tokens, head = 2 * 16, 2 * model.embed.weight.numel()
    extra = row.numbers["GFLOP of products, amor-mamba2"] - row.numbers["GFLOP of products, mamba2"]
    # three readings of the head, keys and values of every token forward and backward; the rest only where a gate fired
    assert extra * 1e9 >= tokens * (3 * head + 3 * 6 * 2 * 256 * 256)


def test_amor_is_compared_with_its_own_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {
        "amor-mamba2": 3.9,
        "amor-gated-deltanet": 4.1,
        "amor-mamba2-once": 3.2,
        "amor-mamba2-gain": 3.1,
    }
    taken = dict.fromkeys(NAMES, 3.0) | slower
    monkeypatch.setattr(
        train,
        "alternate",
        lambda sides, *_, **__: {name: from_rounds([taken[name], 5.0]) for name in sides},
    )
    row = train.throughput(
        BenchmarkTable("train", quick=False), 1, batch=2, micro_batch=2, context=8
    )
    assert {name: ratio.best for name, ratio in row.ratios.items()} == {
        "amor-mamba2 over its backbone": pytest.approx(3 / 3.9),
        "amor-gated-deltanet over its backbone": pytest.approx(3 / 4.1),
        "amor-mamba2-once over its backbone": pytest.approx(3 / 3.2),
        "amor-mamba2-gain over its backbone": pytest.approx(3 / 3.1),
    }
    assert row.numbers["tokens/s, mamba2"] == pytest.approx(16 / 3)
    assert row.numbers["firing rate, amor-mamba2"] > 0, "gates decide as in training"
    recipe = load("tiny/amor-mamba2", batch=2, context=8)
    second = recipe.lr.peak * shape(1, recipe.total_steps, recipe.lr)
    assert train.stepper(recipe)().lr == pytest.approx(second), (
        "the first step, which meets, is not timed"
    )


def test_the_products_of_a_step_are_counted() -> None:
    """Every matrix is multiplied three times a token, but nothing asks for the gradient of what the first layer reads."""
    table = BenchmarkTable("train", quick=True)
    row = train.throughput(table, 1, batch=2, micro_batch=1, context=8)
    model = build(preset("transformer", "tiny"), device="meta")
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert row.numbers["GFLOP of products, transformer"] == pytest.approx(
        6 * 16 * matrices / 1e9, rel=0.02
    )


def test_the_memory_of_a_step_is_that_of_its_process(tmp_path: Path) -> None:
    if not peak.STATUS.exists():
        pytest.skip("this system does not tell")
    wide = tmp_path / "wide.toml"
    wide.write_text("steps = 1\n[model]\nscale = 'tiny'\nchanges = {vocab = 300_000}\n")
    row = memory.step_memory(BenchmarkTable("memory", quick=True), str(wide), 8, ["mamba2"])
    standing, at_peak = (
        row.numbers["GB of weights, gradients and moments, mamba2"],
        row.numbers["GB at the peak, mamba2"],
    )
    assert standing == pytest.approx(16 * (4_484_448 + 256 * (300_000 - 4096)) / 1e9)
    matrix = 4 * 256 * 300_000 / 1e9
    assert standing < at_peak < standing + 2 * matrix + 0.6, (
        "on top: two gradients of the tied matrix to be summed, Python, torch"
    )


@pytest.mark.parametrize("option", ["--batches", "--prefill"])
@pytest.mark.parametrize("text", ["0", "-1", "x", "1,2.5"])
def test_counts_of_a_batch_that_are_none_are_refused(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "batch", "--quick", f"{option}={text}"]) == 2
    assert "whole numbers of at least 1" in capsys.readouterr().err


def test_the_suites_of_the_package_are_those_of_a_user_s_own_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert set(suites()) == {"batch", "decode", "ops", "train"}
    assert set(rows_of_suites()) >= {
        *suites(),
        "peers",
        "busy",
        "scoring",
        "memory",
        "savings",
        "dense",
        "beside",
        "firing",
    }
    with pytest.raises(SystemExit) as left:
        main(["bench", "peers"])
    assert left.value.code == 2


def test_another_program_takes_turns_with_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.sh"
    other.write_text("#!/bin/sh\necho '{\"tok_s_best\": 100.0}'\n")
    other.chmod(0o755)
    words = [
        "--models=mamba2",
        "--weights=int4",
        "--batches=2",
        "--prefill=",
        "--rounds=2",
        "--quick",
        "--json",
    ]
    assert benchmark(["beside", "--command", str(other), *words]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["numbers"]["tokens/s beside, mamba2 int4 decode:2:8"] == pytest.approx(100)
    assert row["ratios"]["mamba2 int4 decode:2:8 over the other"]["rounds"] == 2
    other.write_text("#!/bin/sh\necho nothing of use\n")
    assert benchmark(["beside", "--command", str(other), *words]) == 2
    assert "tok_s_best" in capsys.readouterr().err


def test_a_table_is_printed_whole_whatever_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(
        ["best ms", "tokens/s"],
        {"a side with a long name [and brackets]": ["1.00", "2,000"], "b": ["10.00", ""]},
    )
    head, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert head.split("  ")[-1].strip() == "tokens/s" and "best ms" in head
    assert (
        first.startswith("a side with a long name [and brackets]")
        and first.endswith("2,000")
        and "1.00" in first
    )
    assert second.startswith("b ") and second.endswith("10.00"), second


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "opps"])
    assert left.value.code == 2 and "ops" in capsys.readouterr().err


def test_peers_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert benchmark(["peers", "--quick"]) == 2
    assert "[peers]" in capsys.readouterr().err


def test_sides_take_turns_and_the_warm_up_is_apart() -> None:
    calls: list[str] = []

    def slow_at_first() -> None:
        if not calls:
            time.sleep(0.05)
        calls.append("a")

    times = alternate({"a": slow_at_first, "b": lambda: calls.append("b")}, rounds=3)
    assert "".join(calls[2:]) == "ababab"
    assert times["a"].warm_up >= 0.05 > times["a"].best
    assert [len(side.rounds) for side in times.values()] == [3, 3], "every round is kept"


def test_sides_that_come_in_pieces_take_turns_piece_by_piece(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(timing, "_clock", lambda: now[0])

    def side(name, seconds):
        def begin():
            for number, taken in enumerate(seconds):
                order.append(f"{name}{number}")
                now[0] += taken
                yield
            now[0] += 0.5  # what follows the last piece belongs to the round

        return begin

    found = timing.interleaved({"a": side("a", [1, 2]), "b": side("b", [3, 1, 1])}, rounds=2)
    assert order == ["a0", "a1", "b0", "b1", "b2"] + 2 * ["a0", "b0", "a1", "b1", "b2"], (
        "the first time to warm up, one by one"
    )
    assert found["a"].rounds == (3.5, 3.5) and found["b"].rounds == (5.5, 5.5)


def test_a_memory_peak_is_seen_though_it_is_gone_afterwards() -> None:
    def work() -> None:
        torch.ones(20_000_000)  # 80 MB, freed at once

    extra = extra_peak(work)
    if extra is None:
        pytest.skip("this system does not tell")
    assert 70e6 < extra < 100e6
    assert extra_peak(lambda: None) < 5e6
