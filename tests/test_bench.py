"""The benchmarks run, and say what they measured. How fast anything is, is not tested here."""

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

from amor.bench import bars, machine, memory, steps, timing, train, transformers
from amor.bench.memory import extra_peak
from amor.bench.table import Table
from amor.bench.timing import alternate, lap, of_rounds, watch
from amor.cli import main
from amor.cli.bench import rows_of_suites
from amor.models.build import build
from amor.presets import NAMES, preset
from amor.train.recipe import load
from amor.train.schedule import shape

BARS = Path(__file__).with_name("bars.toml")
KINDS = ("found", "ratios", "beyond")


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["bench", *words, "--quick", "--rounds", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


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
    "decode": ["--contexts", "32,64", "--models", "mamba2-serial,amor-mamba2", "--parts", "contexts,savings,prefill,memory"],
}
# a quick run takes the step of one architecture, because each needs a process of its own and that takes seconds
EXEMPT = {("train", "memory", f"GB at the peak, {name}") for name in NAMES if name != "amor-mamba2"}


@pytest.fixture(scope="module")
def quickly() -> Callable[[str], dict]:
    """What a suite finds with --quick; each is run once."""

    @cache
    def run(suite: str) -> dict:
        told = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(told):
            make_ceilings_small(patch)
            words = [*SUITES[suite], "--quick", "--rounds", "1", "--bars", str(BARS), "--json"]
            assert main(["bench", suite, *words]) == 0
        return json.loads(told.getvalue().splitlines()[-1])

    return run


@pytest.mark.parametrize(("suite", "rows"), [("ops", 8), ("peers", 8), ("train", 3), ("busy", 2), ("scoring", 1), ("decode", 5)])
def test_every_row_carries_shapes_backends_times_and_numbers(suite: str, rows: int, quickly: Callable[[str], dict]) -> None:
    found = quickly(suite)
    assert found["suite"] == suite and found["quick"] and found["ok"]
    assert {"cpu", "cores", "threads", "gemm_gflops", "read_gbs"} <= found["machine"].keys()
    assert {"scan", "delta", "head", "product"} <= found["kernels"].keys()
    assert len(found["rows"]) >= rows
    for row in found["rows"]:
        assert row["name"] in found["asked"] and row["what"] and row["shape"]
        assert row["times"] or row["found"] or row["beyond"]
        for times in row["times"].values():
            assert times["best"] > 0 and times["rounds"] and times["median"] >= min(times["rounds"])
        for ratio in row["ratios"].values():
            assert ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["best"] > 0


@pytest.mark.parametrize("suite", SUITES)
def test_every_bar_of_this_project_names_a_number_that_its_suite_finds(suite: str, quickly: Callable[[str], dict]) -> None:
    if not memory.STATUS.exists():
        pytest.skip("this system does not tell the peaks of memory that some bars are about")
    found = quickly(suite)
    numbers = {(suite, row["name"], name) for row in found["rows"] for kind in KINDS for name in row[kind]}
    wanted = {(bar.suite, bar.row, bar.name) for bar in bars.load(BARS, rows_of_suites()) if bar.suite == suite}
    assert wanted and wanted - numbers <= EXEMPT
    assert {bar["verdict"] for bar in found["bars"] if (suite, bar["row"], bar["name"]) not in EXEMPT} == {"not judged"}
    assert {bar["verdict"] for bar in found["bars"] if (suite, bar["row"], bar["name"]) in EXEMPT} <= {"not measured"}


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_has_our_parameters_between_two_whole_depths(name: str) -> None:
    ours = steps.parameters(build(preset(name, "tiny"), device="meta"))
    depth = transformers.mamba2_depth(ours, 256, 4096)
    with torch.device("meta"):
        low, high = (steps.parameters(transformers.mamba2(256, n, 4096)) for n in (math.floor(depth), math.floor(depth) + 1))
    assert low <= ours < high
    assert low + (depth - math.floor(depth)) * (high - low) == pytest.approx(ours)


def test_the_time_of_a_peer_is_read_off_between_two_depths() -> None:
    row = Table("peers", quick=True).row("training step")
    row.time({f"{steps.MAMBA2} x {n}": of_rounds(taken) for n, taken in ((5, (2.0, 1.0)), (6, (1.4, 3.0)))})
    between = steps.between(row, 5.25)
    assert between.rounds == pytest.approx((1.85, 1.5)), "round by round"
    assert between.best == pytest.approx(1.1), "and by the bests"
    assert steps.between(row, 6.0).best == pytest.approx(1.4)


def test_products_are_counted_whoever_multiplies() -> None:
    row = train.throughput(Table("train", quick=True), 1, batch=2, micro_batch=2, context=16)
    model = build(preset("amor-mamba2", "tiny"), device="meta")
    tokens, head = 2 * 16, 2 * model.embed.weight.numel()
    extra = row.found["GFLOP of products, amor-mamba2"] - row.found["GFLOP of products, mamba2"]
    # three readings of the head, keys and values of every token forward and backward; the rest only where a gate fired
    assert extra * 1e9 >= tokens * (3 * head + 3 * 6 * 2 * 256 * 256)


def test_amor_is_compared_with_its_own_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = {"amor-mamba2": 3.9, "amor-gated-deltanet": 4.1, "amor-mamba2-once": 3.2, "amor-mamba2-gain": 3.1}
    taken = dict.fromkeys(NAMES, 3.0) | slower
    monkeypatch.setattr(train, "alternate", lambda sides, *_, **__: {name: of_rounds([taken[name], 5.0]) for name in sides})
    row = train.throughput(Table("train", quick=False), 1, batch=2, micro_batch=2, context=8)
    assert {name: ratio.best for name, ratio in row.ratios.items()} == {
        "amor-mamba2 over its backbone": pytest.approx(3 / 3.9),
        "amor-gated-deltanet over its backbone": pytest.approx(3 / 4.1),
        "amor-mamba2-once over its backbone": pytest.approx(3 / 3.2),
        "amor-mamba2-gain over its backbone": pytest.approx(3 / 3.1),
    }
    assert row.found["tokens/s, mamba2"] == pytest.approx(16 / 3)
    assert row.found["firing rate, amor-mamba2"] > 0, "gates decide as in training"
    recipe = load("tiny/amor-mamba2", batch=2, context=8)
    second = recipe.lr.peak * shape(1, recipe.total_steps, recipe.lr)
    assert train.stepper(recipe)().lr == pytest.approx(second), "the first step, which meets, is not timed"


def test_the_products_of_a_step_are_counted() -> None:
    """Every matrix is multiplied three times a token, but nothing asks for the gradient of what the first layer reads."""
    table = Table("train", quick=True)
    row = train.throughput(table, 1, batch=2, micro_batch=1, context=8)
    model = build(preset("transformer", "tiny"), device="meta")
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert row.found["GFLOP of products, transformer"] == pytest.approx(6 * 16 * matrices / 1e9, rel=0.02)


def test_the_memory_of_a_step_is_that_of_its_process(tmp_path: Path) -> None:
    if not memory.STATUS.exists():
        pytest.skip("this system does not tell")
    wide = tmp_path / "wide.toml"
    wide.write_text("steps = 1\n[model]\nscale = 'tiny'\nchanges = {vocab = 300_000}\n")
    row = train.step_memory(Table("train", quick=True), 1, str(wide), 8, ["mamba2"])
    standing, peak = row.found["GB of weights, gradients and moments, mamba2"], row.found["GB at the peak, mamba2"]
    assert standing == pytest.approx(16 * (4_484_448 + 256 * (300_000 - 4096)) / 1e9)
    matrix = 4 * 256 * 300_000 / 1e9
    assert standing < peak < standing + 2 * matrix + 0.6, "on top: two gradients of the tied matrix to be summed, Python, torch"


def test_without_transformers_the_rest_of_train_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(train.ROWS, "memory")
    found = ran(capsys, "train")
    assert [row["what"] for row in found["rows"]] == ["trainer's step"] and "amor[peers]" in found["left_out"]["peers"]
    assert main(["bench", "train", "--quick", "--only", "peers"]) == 2
    assert "amor[peers]" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batches", "--prefill"])
@pytest.mark.parametrize("text", ["0", "-1", "x", "1,2.5"])
def test_counts_of_a_batch_that_are_none_are_refused(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "batch", "--quick", f"{option}={text}"]) == 2
    assert "whole numbers of at least 1" in capsys.readouterr().err


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "opps"])
    assert left.value.code == 2 and "ops" in capsys.readouterr().err


def test_peers_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", "peers", "--quick"]) == 2
    assert "amor[peers]" in capsys.readouterr().err


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


def test_the_best_laps_together_are_kept_beside_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [0.0], iter([9, 9, 9, *(1, 5, 2), *(4, 2, 2), *(2, 3, 1)])  # the warm-up first, then rounds of three laps
    monkeypatch.setattr(timing, "_clock", lambda: now[0])

    def restless() -> None:
        for number in range(3):
            now[0] += next(left)
            if number < 2:
                lap()

    times = alternate({"it": restless}, rounds=3)
    assert times["it"].rounds == (8, 8, 6) and times["it"].best == 6 and times["it"].median == 8
    assert times["it"].by_laps == 1 + 2 + 1
    assert times["it"].each(2).by_laps == 2 and times["it"].each(2).rounds == (4, 4, 3)
    assert alternate({"it": lambda: None}, rounds=3)["it"].by_laps is None, "nothing was marked"


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
    assert order == ["a0", "a1", "b0", "b1", "b2"] + 2 * ["a0", "b0", "a1", "b1", "b2"], "the first time to warm up, one by one"
    assert found["a"].rounds == (3.5, 3.5) and found["b"].rounds == (5.5, 5.5) and found["b"].by_laps == 5.5


def test_a_watched_model_marks_its_layers_on_both_ways_and_computes_what_it_did() -> None:
    tokens, found = torch.arange(12).view(2, 6), []
    for watched in (False, True):
        model = build(preset("amor-mamba2", "tiny"), 0)
        if watched:
            watch(model)
        timing._laps.clear()
        loss = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
        forward = len(timing._laps)
        loss.backward()
        found.append((loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)))
        layers = len(model.backbone.layers)
        assert (forward >= layers and len(timing._laps) - forward >= layers) if watched else not timing._laps
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_memory_peak_is_seen_though_it_is_gone_afterwards() -> None:
    def work() -> None:
        torch.ones(20_000_000)  # 80 MB, freed at once

    peak = extra_peak(work)
    if peak is None:
        pytest.skip("this system does not tell")
    assert 70e6 < peak < 100e6
    assert extra_peak(lambda: None) < 5e6
