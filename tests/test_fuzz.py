"""A minute of nonsense: `python tests/fuzz.py` is the same for as long as asked."""

import contextlib
import io
from pathlib import Path

import fuzz
import pytest

CASES = 18 * len(fuzz.every_target())


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Path:
    with contextlib.redirect_stdout(io.StringIO()):
        return fuzz.stock(tmp_path_factory.mktemp("stock"))


def test_whatever_is_given_an_answer_or_one_line_comes_back(held: Path):
    failures = fuzz.run(CASES, seed=1, stock=held)
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize(
    ("act", "wrong"),
    [
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (lambda _: 70, "exit code 70"),
        (lambda _: 2, "not one line"),
        (lambda _: bytearray(3 << 30) and 0, "MemoryError"),
        (lambda _: __import__("os").kill(__import__("os").getpid(), 9), "signal 9"),
        (lambda _: __import__("time").sleep(60), "longer than"),
    ],
)
def test_what_must_not_happen_is_seen(act, wrong: str, held: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker is born by fork here, so that it runs the act of this test."""
    import multiprocessing

    monkeypatch.setattr(fuzz, "WORKERS", multiprocessing.get_context("fork"))
    monkeypatch.setattr(fuzz, "SECONDS", 2.0)
    monkeypatch.setitem(
        fuzz.TARGETS, "bars", fuzz.dataclasses.replace(fuzz.TARGETS["bars"], acts=(act,))
    )
    (failure,) = fuzz.run(1, seed=0, stock=held, only="bars")
    assert wrong in failure
