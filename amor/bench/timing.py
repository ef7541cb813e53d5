"""Timing: the sides of a comparison take turns in one process, every round is kept, and the warm-up
is not counted."""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True)
class Timings:
    """Seconds of one side, without its warm-up. Sides that took turns have equally many rounds;
    round i of one is compared with round i of another."""

    best: float  # seconds of the fastest round
    median: float  # seconds of the median round
    rounds: tuple[float, ...]  # seconds of every round, in the order they ran
    warm_up: float = 0.0  # seconds of the first call, which also compiles and allocates

    def divided(self, parts: int) -> "Timings":
        """Seconds per part, for rounds that consist of `parts` equal parts (tokens, say)."""
        return combined(lambda seconds: seconds / parts, self)


def from_rounds(rounds: Sequence[float], warm_up: float = 0.0) -> Timings:
    """Timings of measured rounds, in seconds."""
    return Timings(min(rounds), statistics.median(rounds), tuple(rounds), warm_up)


def combined(function: Callable[..., float], *sides: Timings) -> Timings:
    """Timings computed from those of sides that took turns: round by round, and from the best round
    of each."""
    rounds = [function(*each) for each in zip(*(side.rounds for side in sides), strict=True)]
    best = function(*(side.best for side in sides))
    return Timings(best, statistics.median(rounds), tuple(rounds))


_clock: Callable[[], float] = time.perf_counter


def use_cpu_time() -> None:
    """Use one thread from here on and count its own CPU seconds: time spent waiting for other
    programs is not counted."""
    global _clock
    torch.set_num_threads(1)
    _clock = time.thread_time


def clock_name() -> str:
    """Which clock counts, as it is written into results."""
    return "wall" if _clock is time.perf_counter else "cpu seconds of one thread"


def clock(work: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = _clock()
    work()
    return _clock() - start


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python collects no garbage inside a `with`: a collection would be charged to whichever side
    is running."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_END = object()


def interleaved(
    sides: Mapping[str, Callable[[], Iterator[Any]]], rounds: int = 5
) -> dict[str, Timings]:
    """Time sides whose rounds come in pieces (one per `next` of an iterator), piece by piece in
    turn, after one round of each to warm up. A round is the sum of its pieces.

    Other programs come and go on a shared machine. What slows it down for longer than some pieces
    slows all sides alike, so sides are compared round by round (amor/bench/ratio.py).
    """
    warm = {name: clock(partial(deque, begin(), 0)) for name, begin in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with no_garbage_collection():
        for _ in range(rounds):
            running = {name: begin() for name, begin in sides.items()}
            for name in sides:
                seconds[name].append(0.0)
            while running:
                for name, pieces in list(running.items()):
                    start = _clock()
                    ended = next(pieces, _END) is _END
                    seconds[name][-1] += _clock() - start
                    if ended:
                        del running[name]
    return {name: from_rounds(each, warm[name]) for name, each in seconds.items()}


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, Timings]:
    """Time sides whose rounds are one call each, in turn, after one call of each to warm up."""

    # an iterator of one piece: all of the round is in its first `next`
    pieces = {name: partial(map, lambda work: work(), [work]) for name, work in sides.items()}
    return interleaved(pieces, rounds)


def best(work: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of the fastest of several calls, after one to warm up."""
    return alternate({"": work}, rounds)[""].best
