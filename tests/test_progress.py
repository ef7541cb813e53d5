"""Progress: estimates of the time to go, and lines that are due now and then."""

import pytest

from amor import progress
from amor.progress import Countdown, Every, Progress, amount, clock


@pytest.fixture
def now(monkeypatch):
    """A clock that the test sets, in seconds."""
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    return seconds


def test_the_time_to_go_follows_the_pace_after_the_first_update_which_compiles(now):
    countdown = Countdown(total=100)
    assert countdown.to_go is None
    now[0] = 50.0
    countdown.to(10)
    assert countdown.to_go == 450, "by all there is: 5 seconds each"
    now[0] = 60.0
    countdown.to(20)
    assert countdown.to_go == 80, "10 units in 10 seconds since then; 80 are left"


def test_resumed_work_counts_only_what_this_process_did(now):
    countdown = Countdown(total=100, done=90)
    now[0] = 10.0
    countdown.to(95)
    assert countdown.to_go == 10


def test_a_line_is_due_once_after_its_seconds(now):
    line = Every(15)
    assert not line.due()
    now[0] = 15.0
    assert line.due() and not line.due()
    now[0] = 29.0
    assert not line.due()
    now[0] = 30.0
    assert line.due()


def test_without_a_terminal_progress_is_a_line_on_stderr_every_15_seconds(now, capsys):
    with Progress("reading", total=2000, unit="tokens") as shown:
        shown.to(500)
        now[0] = 20.0
        shown.add(500)
        shown.add(0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "reading: 1.0 k tokens (50 %), 50 tokens/s, 0:40 to go\n"


def test_amounts_and_clocks_have_few_digits():
    assert [amount(999, "B"), amount(1_234_567, "B"), amount(2e9, "tokens")] == [
        *("999 B", "1.2 MB", "2.0 G tokens")
    ]
    assert [clock(75), clock(3700)] == ["1:15", "1:01:40"]
