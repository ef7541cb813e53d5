"""The decode benchmark measures what it says: rates as asked, formulas that meet what models
declare, a state as if read."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
from laws import small

from amor.bench import crossing, machine
from amor.bench.decode import DecodePlan, crossings
from amor.bench.simulate import ScheduledRounds, build_active, filled_state, round_size, schedule
from amor.bench.timing import alternate
from amor.cli import main
from amor.decode.engine import Engine
from amor.decode.savings import Savings
from amor.models.build import build
from amor.presets import NAMES, preset
from amor.records.bench import ModelTiming
from benchmarks import bars
from benchmarks.__main__ import main as benchmark
from benchmarks.__main__ import rows_of_suites


@pytest.mark.parametrize("rate", [0.0, 0.22, 0.4, 0.7, 1.0])
def test_a_round_fires_as_often_as_asked(rate):
    tokens, fired = round_size(rate)
    assert abs(fired / tokens - rate) < 0.01
    for block in range(3):
        assert sum(schedule(fired / tokens, block, tokens)) == fired


@pytest.mark.parametrize("rate", [0.0, 0.22, 1.0])
@pytest.mark.parametrize(
    "savings", [Savings(), Savings(compiled=False), Savings(joint=False), Savings.none()]
)
def test_simulated_gates_fire_by_schedule_and_their_probes_run(rate, savings):
    model = small("amor-mamba2")
    rounds = ScheduledRounds(Engine(model, savings), filled_state(model, 50, 32), rate)
    own = [block.gate for block in model.each_block()]
    rounds.run()
    assert rounds.engine.stats.fired == [rounds.fired] * 3
    passes = rounds.engine.passes
    if savings.joint:
        speculated = (
            savings.compiled
        )  # after the first firing one pass tells that all others fire too
        assert passes.passes == rounds.tokens + (1 if speculated else 3) * rounds.fired
    else:
        assert passes.passes == 4 * rounds.tokens
    assert [block.gate for block in model.each_block()] == own


@pytest.mark.parametrize(
    ("name", "more", "apart"),
    [("amor-mamba2-final", 1, 4), ("amor-mamba2-once", 1, 2), ("amor-mamba2-gain", 0, 1)],
)
def test_variants_are_simulated_with_the_passes_over_the_head_that_they_need(name, more, apart):
    """One per token, and `more` where blocks fire; read for one vector
    at a time, `apart` per token."""
    model = small(name)
    rounds = ScheduledRounds(Engine(model, Savings()), filled_state(model, 50, 32), 0.22)
    spent = rounds.cost()
    assert rounds.engine.stats.fired == [rounds.fired] * 3 and rounds.fired == 4
    assert spent.head_passes * rounds.tokens == pytest.approx(rounds.tokens + more * rounds.fired)
    assert spent.head_passes == pytest.approx(model.head_passes(rounds.rate))
    separate = ScheduledRounds(
        Engine(model, Savings(joint=False)), filled_state(model, 50, 32), 0.22
    )
    assert separate.cost().head_passes == pytest.approx(apart)


def test_simulated_gates_have_met_numbers_as_those_of_trained_models():
    gain, entropy = (
        build_active(name, "tiny").each_block()[0].gate
        for name in ("amor-mamba2-gain", "amor-mamba2")
    )
    assert gain.pred_std > 0, "it still explores, which decides by other numbers"
    assert gain.threshold.isfinite() and entropy.threshold.isfinite()


def test_a_round_is_one_step_per_token():
    model = small("amor-mamba2")
    rounds = ScheduledRounds(Engine(model), filled_state(model, 50, 32), 0.22)
    assert len(list(rounds.pieces())) == rounds.tokens == 18
    times = alternate({"it": rounds.run}, rounds=3)["it"].divided(rounds.tokens)
    assert len(times.rounds) == 3 and 0 < times.best == min(times.rounds)


@pytest.mark.parametrize("name", NAMES)
def test_every_round_begins_at_the_same_context_and_copies_no_key(name):
    model = small(name)
    rounds = ScheduledRounds(Engine(model), filled_state(model, 50, 32), 0.4)
    (row,) = rounds.base.rows
    for _ in range(3):
        rounds.run()
        assert rounds.base.position.tolist() == [50]
        assert rounds.base.rows[0].keys is row.keys


def test_the_formulas_are_the_paper_s_and_ours_is_where_declared_attention_meets_declared_head():
    assert round(crossing.paper_break_even(128_256, 0.22) / 1000) == 82
    assert [
        crossing.attention_layers(n, "440m")
        for n in ("transformer", "mamba2-serial", "mamba2-fused", "mamba2")
    ] == [
        24,
        3,
        0.75,
        0,
    ]
    gated, serial = (
        build(preset(n, "440m"), device="meta") for n in ("amor-mamba2", "mamba2-serial")
    )
    where = crossing.break_even(128_256, 0.22, 3, 1.66, 3)

    def growing(model, *more):  # FLOPs that attention and head add
        return model.cost(int(where), *more).flops - model.cost(0, *more).flops

    head = 2 * gated.embed.weight.numel()
    assert growing(serial) == pytest.approx(growing(gated, 0.22) + 0.66 * head, rel=1e-3)
    equal = crossing.bytes_break_even(gated, serial, 0.22, 1.66)
    mine, theirs = gated.cost(int(equal), 0.22, 1.66), serial.cost(int(equal))
    assert 4 * mine.weights + mine.state_read == pytest.approx(
        4 * theirs.weights + theirs.state_read, rel=1e-4
    )
    assert crossing.break_even(128_256, 1.0, 3, 4, 3) is None
    # where both read less of the head
    assert crossing.break_even(128_256, 0.22, 3, 0.6, 3, 0.25) == pytest.approx(where * 0.35 / 0.66)
    assert 0 < crossing.bytes_break_even(gated, serial, 0.22, 0.6, 0.25) < equal


def test_a_measured_crossing_lies_between_the_contexts_that_enclose_it():
    assert crossing.measured_break_even([1, 2, 4], [2, 1, -2]) == pytest.approx(2 + 2 * 1 / 3)
    assert crossing.measured_break_even([1, 2], [-1, -1]) == 0
    assert crossing.measured_break_even([1, 2], [1, 1]) is None


def measured_at(label, context, *rounds):
    """What is known of a model at a context: seconds a token of each round."""
    spent = {"bytes": 1.0, "flops": 1.0, "breakdown": {}, "head_passes": 1.0}
    taken = {"seconds": min(rounds), "median": 1.0, "rounds": rounds, "tokens_per_second": 1.0}
    return ModelTiming(
        label=label, name=label.split(" ")[0], context=context, rate=0.22, **spent, **taken
    )


@pytest.mark.parametrize(
    ("longest", "behind", "verdict"),
    [
        (32768, -1.0, "met"),
        (65536, -0.1, "MISSED"),
        (32768, 0.5, "MISSED"),
        (16384, 0.5, "not judged"),
        (16384, -0.5, "met"),
    ],
)
def test_the_crossing_with_a_serial_hybrid_at_440m_is_judged_by_pairs(
    longest, behind, verdict, monkeypatch
):
    """At the first context we are slower by one second a token, at the longest
    by `behind`, round by round."""
    monkeypatch.setattr(machine, "gemm_rate", lambda: 1.0)
    monkeypatch.setattr(machine, "bandwidth", lambda: 1.0)
    names, contexts = "amor-mamba2,mamba2-serial", f"3072,{longest}"
    args = Namespace(
        rounds=3, models=names, quick=False, scale="440m", contexts=contexts, fire_rates="0.22"
    )
    plan = DecodePlan("decode", args)
    plan.table.request("contexts")
    curves = [
        measured_at("mamba2-serial", context, 10.0, 20.0, 30.0) for context in (3072, longest)
    ]
    curves += [
        measured_at("amor-mamba2 f=0.22", 3072, 9.0, 21.0, 31.0)
    ]  # once faster: its best says nothing
    curves += [measured_at("amor-mamba2 f=0.22", longest, *(10 * k + behind for k in (1, 2, 3)))]
    (found,) = crossings(plan, curves)
    assert found.measured_by_best == 0 and found.measured != 0
    limits = bars.load(Path(bars.__file__).with_name("bars.toml"), rows_of_suites())
    (judged,) = bars.compare(plan.table.result() | {"scale": "440m"}, limits)
    assert judged.verdict == verdict
    assert bars.compare(plan.table.result() | {"scale": "180m"}, limits) == [], (
        "the bar is one of 440m"
    )


def test_the_command_runs_and_its_table_and_figure_read_its_file(tmp_path, capsys):
    names = "mamba2,mamba2-serial,amor-mamba2,amor-mamba2-gain"
    words = ["--quick", "--rounds", "1", "--contexts", "32,64", "--models", names]
    out = tmp_path / "decode.json"
    assert (
        main(["bench", "decode", *words, "--parts", "contexts,curve", "--out", str(out), "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads(out.read_text())
    gated = {
        f"{name} f={rate}" for name in ("amor-mamba2", "amor-mamba2-gain") for rate in (0.22, 0.4)
    }
    assert {c["label"] for c in found["curves"]} == {"mamba2", "mamba2-serial"} | gated
    assert {one["gated"] for one in found["crossings"]} == gated
    assert main(["report", str(out)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\| amor-mamba2 f=0.22 +\|", said)
    assert re.search(r"\| amor-mamba2-gain f=0.22 over mamba2-serial +\|", said)
    pytest.importorskip("matplotlib")
    assert main(["report", str(out), "--figure", str(tmp_path / "decode.png")]) == 0
    assert (tmp_path / "decode.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "text", ["", "[]", '{"suite": "ops"}', '{"suite": "decode", "scale": "tiny"}']
)
def test_a_file_that_is_not_a_decode_benchmark_is_refused(tmp_path, capsys, text):
    (tmp_path / "other.json").write_text(text)
    assert main(["report", str(tmp_path / "other.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_real_firing_rates_come_from_a_trained_folder_and_a_text(tmp_path):
    from amor.bench.rates import firing_rates, open_gated
    from amor.data.tokenizer import bytes_tokenizer
    from amor.models.folder import save

    model = small("amor-mamba2", vocab=257)
    save(model, tmp_path / "model", bytes_tokenizer())
    (tmp_path / "text.txt").write_text("some words to read " * 5)
    model, ids = open_gated(str(tmp_path / "model"), str(tmp_path / "text.txt"))
    found = firing_rates(model, ids, lengths=(40, 200))
    assert [(f.prompt, f.temperature, f.repeated) for f in found] == [
        (40, 0.0, False),
        (40, 1.0, False),
        (200, 0.0, True),
        (200, 1.0, True),
    ]
    assert all(0 < f.rate < 1 and len(f.rates) == 3 for f in found)


def test_how_blocks_fire_on_a_text_is_measured_on_a_trained_folder(tmp_path, monkeypatch, capsys):
    from amor.data.tokenizer import bytes_tokenizer
    from amor.models.folder import save

    monkeypatch.setattr(machine, "gemm_rate", lambda: 1.0)
    monkeypatch.setattr(machine, "bandwidth", lambda: 1.0)
    save(small("amor-mamba2", vocab=257), tmp_path / "model", bytes_tokenizer())
    (tmp_path / "text.txt").write_text("some words to read " * 5)
    words = [
        "firing",
        "--model",
        str(tmp_path / "model"),
        "--text",
        str(tmp_path / "text.txt"),
        "--quick",
        "--json",
    ]
    assert benchmark(words) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    some, every, followed = (
        row["numbers"][f"{name}, aimed at 22%"] for name in ("some", "all", "followed")
    )
    assert 0 <= every <= some <= 1 and 0 <= followed <= 1
    save(small("mamba2", vocab=257), tmp_path / "other", bytes_tokenizer())
    words[2] = str(tmp_path / "other")
    assert benchmark(words) == 2 and "has no gates" in capsys.readouterr().err
