"""The demo on invented addresses and a smaller recipe: its output, its files, running it again."""

import json

import pytest
from training import KilledError, Killer, invented_demo

from amor.cli import demo, main
from amor.data.tasks.base import read_task
from amor.gates.override import override_gates
from amor.judge.gates import own_gates
from amor.models.folder import load_model
from amor.models.gated import PassOptions
from amor.records.run import Step
from amor.run import Run
from amor.train.loop import train
from amor.train.resume import recipe_of


@pytest.fixture
def out(tmp_path, monkeypatch):
    invented_demo(tmp_path, monkeypatch)
    return tmp_path / "run"


def ran(out, *more):
    return main(["demo", "--out", str(out), *more])


def test_the_demo_says_what_it_learned_and_leaves_a_report(out, capsys):
    assert ran(out, "--json") == 0
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert (out / "report.html").is_file() and found["step"] == 2
    assert f"held-out perplexity {found['judged']['perplexity']:.1f}" in said
    assert f"token frequencies alone: {found['unigram']['perplexity']:.0f}" in said
    first = said.splitlines()[0]
    assert "for about five minutes" in first and "recall task for about a minute" in first
    assert "a new run" in said and "attention ran on" in said and f"{out}/report.html" in said
    assert said.count("  amor ") == 3
    saved = {name: found["attention"][name]["saved"] for name in ("gate", "chance", "everywhere")}
    words = f"chosen by chance it saves {saved['chance']:.3f}, run on all {saved['everywhere']:.3f}"
    assert f"that saved {saved['gate']:.3f}" in said and words in said
    assert len(found["fire"]) == 3 and found["judged"]["tokens"] == 4 * 24
    right = {
        name: found["recall"][name]["mean"] for name in ("gate", "chance", "everywhere", "never")
    }
    chosen = f"{found['recall']['rate']:.0%} of the tokens, where the gate chose"
    assert f"ran on {chosen}, and {right['gate']:.0%} of the" in said
    others = f"run on all {right['everywhere']:.0%}, run on none {right['never']:.0%}"
    assert f"by chance {right['chance']:.0%}, {others}" in said


def test_a_demo_of_its_own_length_or_model_is_the_text_alone(out, capsys):
    assert ran(out, "--steps", "2", "--json") == 0
    said = capsys.readouterr().out
    first = said.splitlines()[0]
    assert "for 2 steps" in first and "recall" not in first
    assert (
        json.loads(said.splitlines()[-1])["recall"] is None and "asked for among noise" not in said
    )


def test_what_the_last_number_counts_is_what_recall_counts(out):
    assert ran(out) == 0
    model, task = load_model(out / "recall"), read_task(recipe_of(Run(out / "recall")).task)
    found = demo.train_recall(out / "recall")
    text = task.rows(0, "test", 0, 0, 256)
    for gate in ("never", "always"):
        best = model.logits(
            model(
                text.tokens, options=PassOptions(gates=override_gates(own_gates(model), gate))
            ).hidden
        ).argmax(-1)
        right = (best == text.targets)[text.question > 0].double().mean()
        assert found["everywhere" if gate == "always" else gate]["mean"] == pytest.approx(
            float(right), abs=1e-9
        )
    fires = [g.fire.double().mean() for g in model(text.tokens).gates]
    assert found["rate"] == pytest.approx(float(sum(fires) / 3), abs=1e-6)


def test_a_finished_demo_is_shown_again_and_not_trained_again(out, capsys):
    assert ran(out) == 0
    before = (out / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert ran(out) == 0
    assert "holds a finished demo" in capsys.readouterr().out
    assert (out / "metrics.jsonl").read_text() == before


def test_a_stopped_demo_goes_on(out, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(
            "amor.train.loop.train",
            lambda recipe, to, seen, *more: train(recipe, to, [*seen, Killer(2)], *more),
        )
        with pytest.raises(KilledError):
            ran(out)
    capsys.readouterr()
    assert ran(out) == 0
    said = capsys.readouterr().out
    assert (
        "holds a demo that was stopped; it goes on" in said and "going on from step-000001" in said
    )


def test_a_demo_of_another_kind_is_neither_mixed_in_nor_lost(out, capsys):
    assert ran(out) == 0
    assert ran(out, "--steps", "3") == 2
    assert "--fresh replaces it" in capsys.readouterr().err
    assert [line.step for line in Run(out).lines() if isinstance(line, Step)] == [1, 2]
    assert ran(out, "--steps", "3", "--model", "mamba2", "--fresh") == 0
    assert [line.step for line in Run(out).lines() if isinstance(line, Step)] == [1, 2, 3]
    assert "attention ran on" not in capsys.readouterr().out


def test_every_architecture_can_be_shown(out):
    assert ran(out, "--model", "amor-mamba2-nogate") == 0
    assert "Gates on held-out text" in (out / "report.html").read_text()


def test_fresh_deletes_a_demo_and_nothing_else(out, capsys):
    run = Run(out)
    run.make()
    run.write_config({"name": "months-of-work", "model": {"name": "mamba2"}})
    assert ran(out, "--fresh") == 2
    assert "is not a demo" in capsys.readouterr().err and run.used


def test_minutes_become_steps(out, capsys):
    assert ran(out, "--minutes", "0.0001") == 0
    assert "s per step here" in capsys.readouterr().out
    assert Run(out).recipe().steps >= 1
