"""The benchmarks run, and say what they measured. How fast anything is, is not tested here."""

import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch

from amor.bench import machine, memory, steps, timing, train, transformers
from amor.bench.memory import extra_peak
from amor.bench.table import Table
from amor.bench.timing import alternate, lap, of_rounds, watch
from amor.cli import main
from amor.models.build import build
from amor.presets import NAMES, preset
from amor.train.recipe import load


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["bench", *words, "--quick", "--rounds", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of small matrices and arrays: their size does not matter here."""
    monkeypatch.setattr(machine, "GEMM_SIZE", 64)
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)


# the rows of `peers` and how many bars each has to meet
BARS = {
    "Mamba2 layer, forward and backward": 3,
    "Gated DeltaNet layer, forward and backward": 1,
    "training step": 9,
    "decode, Mamba2 without MLP": 3,
    "prefill, Mamba2 without MLP": 1,
    "loss and gradient": 2,
    "entropy": 2,
    "memory of the scan, forward and backward": 1,
}


# and those of `train`; a full run has eight bars of memory
TRAIN_BARS = {"trainer's step": 2, "training step": 9, "memory of a step": 1}


@pytest.mark.parametrize(("suite", "rows"), [("ops", 8), ("peers", 8), ("train", 3)])
def test_every_row_carries_shapes_backends_seconds_and_bars(suite: str, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = ran(capsys, suite)
    assert found["suite"] == suite and found["quick"] and found["ok"]
    assert {"cpu", "cores", "threads", "gemm_gflops", "read_gbs"} <= found["machine"].keys()
    assert {"scan", "delta", "head", "product"} <= found["kernels"].keys()
    assert len(found["rows"]) >= rows
    for row in found["rows"]:
        assert row["what"] and row["shape"] and (row["seconds"] or row["found"])
        assert all(seconds > 0 for seconds in row["seconds"].values())
        for bar in row["bars"]:
            assert bar["met"] is None and bar["value"] == bar["value"]
    if suite != "ops":
        wanted = BARS if suite == "peers" else TRAIN_BARS
        assert {row["what"]: len(row["bars"]) for row in found["rows"]} == wanted


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
    row.time({f"{steps.MAMBA2} x {n}": of_rounds([seconds]) for n, seconds in ((5, 1.0), (6, 1.4))})
    assert steps.between(row, 5.25) == pytest.approx(1.1) and steps.between(row, 6.0) == pytest.approx(1.4)


def test_a_missed_bar_is_a_failure() -> None:
    table = Table("ops", quick=False)
    row = table.row("a row", "head", tokens=1)
    table.bar(row, "speed", 2.0, at_least=1.0)
    table.bar(row, "memory", 2.0, at_most=1.0)
    assert [bar.met for bar in row.bars] == [True, False]
    found = table.result()
    assert not found["ok"] and found["missed"] == ["a row: memory 2 (≤ 1: MISSED)"]


def test_products_are_counted_whoever_multiplies() -> None:
    row = train.throughput(Table("train", quick=True), 1, batch=2, micro_batch=2, context=16)
    model = build(preset("amor-mamba2", "tiny"), device="meta")
    tokens, head = 2 * 16, 2 * model.embed.weight.numel()
    extra = row.found["GFLOP of products, amor-mamba2"] - row.found["GFLOP of products, mamba2"]
    # three readings of the head, keys and values of every token forward and backward; the rest only where a gate fired
    assert extra * 1e9 >= tokens * (3 * head + 3 * 6 * 2 * 256 * 256)


def test_amor_slower_than_its_backbone_allows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dict.fromkeys(NAMES, 3.0) | {"amor-mamba2": 3.9, "amor-gated-deltanet": 4.1}
    monkeypatch.setattr(train, "alternate", lambda sides, *_, **__: {name: of_rounds([taken[name], 5.0]) for name in sides})
    table = Table("train", quick=False)
    row = train.throughput(table, 1, batch=2, micro_batch=2, context=8)
    assert [(bar.what, bar.met) for bar in row.bars] == [
        ("amor-mamba2 over mamba2", True),
        ("amor-gated-deltanet over gated-deltanet", False),
    ]
    assert row.found["tokens/s, mamba2"] == pytest.approx(16 / 3)
    assert row.found["firing rate, amor-mamba2"] > 0, "gates decide as in training"
    assert train.stepper(load("tiny/amor-mamba2", batch=2, context=8))()["step"] == 2, "the first step, which meets, is not timed"


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
    (standing,), (peak,) = row.found.values(), [bar.value for bar in row.bars]
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
