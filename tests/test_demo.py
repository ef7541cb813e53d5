"""Laws of the demo, on invented addresses and a smaller recipe: what it says, what it leaves, what it does when run again."""

import json

import pytest
from training import KilledError, Killer, invented_demo

from amor.cli import main
from amor.records.run import Step
from amor.run import Run
from amor.train.loop import train


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
    assert "a new run" in said and "attention ran on" in said and f"{out}/report.html" in said
    assert said.count("  amor ") == 3
    saved = {name: found["attention"][name]["saved"] for name in ("gate", "chance", "everywhere")}
    words = f"chosen by chance it saves {saved['chance']:.3f}, run on all {saved['everywhere']:.3f}"
    assert f"that saved {saved['gate']:.3f}" in said and words in said
    assert len(found["fire"]) == 3 and found["judged"]["tokens"] == 4 * 24


def test_a_finished_demo_is_shown_again_and_not_trained_again(out, capsys):
    assert ran(out) == 0
    before = (out / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert ran(out) == 0
    assert "holds a finished demo" in capsys.readouterr().out
    assert (out / "metrics.jsonl").read_text() == before


def test_a_stopped_demo_goes_on(out, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("amor.train.loop.train", lambda recipe, to, seen, *more: train(recipe, to, [*seen, Killer(2)], *more))
        with pytest.raises(KilledError):
            ran(out)
    capsys.readouterr()
    assert ran(out) == 0
    said = capsys.readouterr().out
    assert "holds a demo that was stopped; it goes on" in said and "going on from step-000001" in said


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
    assert "s a step here" in capsys.readouterr().out
    assert Run(out).recipe().steps >= 1
