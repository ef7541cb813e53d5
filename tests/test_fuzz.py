"""A part of the fuzzer: `python -m tests.fuzz` is the same for as long as you like."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import fuzz
import fuzz_surfaces
import pytest
from fuzz import Case

PER_SURFACE = 1
# one act of each kind of input that is opened, as it is; `python -m tests.fuzz` runs all of them
SOUND = ("model/config", "tokenizer/bpe", "state", "hf/config", "eval/rows", "results/scores")


@pytest.fixture(scope="module")
def server() -> Iterator[fuzz.Server]:
    with fuzz.servers(1) as (one,):
        yield one


@pytest.fixture(scope="module")
def stock(server: fuzz.Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return server.make_stock(tmp_path_factory.mktemp("stock"))


def failures(cases, stock: Path, server: fuzz.Server, keep: Path) -> str:
    ended = fuzz.run(cases, stock, [server], keep)
    return "\n\n".join(fuzz.described(*one, keep) for one in ended if fuzz.is_failure(*one))


def test_inputs_that_nothing_was_done_to_succeed(server, stock, tmp_path):
    assert not failures([Case(name, -1) for name in SOUND], stock, server, tmp_path)


def test_whatever_is_given_there_is_an_answer_or_one_line(server, stock, tmp_path):
    count = PER_SURFACE * len(fuzz_surfaces.names())
    assert not failures(fuzz.spoiled_cases(count, seed=1), stock, server, tmp_path)


def killed(_: Path) -> int:
    os.kill(os.getpid(), 9)
    return 0


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The outcome of an act of this test, by a server that is a fork of this process."""

    def outcome(act, keep: Path | None = None) -> fuzz.Outcome:
        (tmp_path / "bars.toml").write_text("a = 1\n")
        monkeypatch.setattr(fuzz, "SERVERS", multiprocessing.get_context("fork"))
        monkeypatch.setattr(fuzz, "PRELOADED", ())
        monkeypatch.setattr(fuzz, "SECONDS", 1.0)
        monkeypatch.setitem(fuzz_surfaces.PYTHON, "bars_of", act)
        with fuzz.servers(1) as (server,):
            return server.ask(Case("bars", 0), tmp_path, keep)

    return outcome


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda _: 1 / 0, "traceback", "ZeroDivisionError"),
        (lambda _: 70, "other", "exit code 70"),
        (lambda _: 2, "other", "not one line"),
        (lambda _: bytearray(3 << 30) and 0, "traceback", "MemoryError"),
        (killed, "signal", "signal 9"),
        (lambda _: time.sleep(60), "hang", "longer than"),
        (lambda _: [None for _ in iter(int, 1)], "hang", "longer than"),
    ],
)
def test_what_must_not_happen_is_seen(act, kind: str, words: str, failing):
    outcome = failing(act)
    assert outcome.kind == kind and words in outcome.message
    assert fuzz.is_failure(Case("bars", 0), outcome)


def test_a_failure_is_kept_with_its_inputs_and_can_be_replayed(failing, tmp_path, monkeypatch):
    def seen(folder: Path) -> int:
        raise ValueError((folder / "bars.toml").read_text())

    first = failing(seen, tmp_path / "kept")
    kept = tmp_path / "kept" / "bars-0"
    assert (kept / "inputs" / "bars.toml").read_text() != "a = 1\n"
    monkeypatch.chdir(tmp_path)  # replaying goes to the folder of the inputs
    again = fuzz.replay(kept)
    assert again.words == first.words == ("python", "bars_of")
    assert again.message.splitlines()[-1] == first.message.splitlines()[-1]


def test_the_summary_counts_each_surface_and_all():
    one, other = Case("state", 0), Case("bars", 0)
    ended = [(one, fuzz.Outcome("success")), (one, fuzz.Outcome("hang"))]
    lines = fuzz.summary([*ended, (other, fuzz.Outcome("one line"))]).splitlines()
    numbers = {line.split()[0]: [int(word) for word in line.split()[1:]] for line in lines[1:]}
    assert numbers["state"][:3] == [2, 1, 0] and numbers["bars"][:3] == [1, 0, 1]
    assert numbers["all"] == [3, 1, 1, 0, 0, 1, 0, 0] and list(numbers)[-1] == "all"
