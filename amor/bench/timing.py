"""Honest timing: sides measured in turn in one process, the best of several kept, the warm-up left out."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Times:
    """Seconds of one side, the warm-up apart."""

    best: float
    median: float
    rounds: int
    warm_up: float


_clock: Callable[[], float] = time.perf_counter


def count_cpu_time() -> None:
    """From here on one thread, and its own seconds only: on a machine that others use, waiting for them is left out."""
    global _clock
    torch.set_num_threads(1)
    _clock = time.thread_time


def clock_name() -> str:
    return "wall" if _clock is time.perf_counter else "cpu seconds of one thread"


def clock(work: Callable[[], Any]) -> float:
    start = _clock()
    work()
    return _clock() - start


ALIKE = 1.02  # two rounds that differ by less are taken to have met the same machine


def alternate(
    sides: Mapping[str, Callable[[], Any]], rounds: int = 5, least: float = 0.0, confirm: bool = False
) -> dict[str, Times]:
    """Each side in turn, `rounds` times; a side faster than `least` seconds is repeated inside a round to fill them.

    Other programs come and go on a shared machine. Taking turns spreads their harm over all sides; the best round is the
    one they harmed least. confirm: a best that was met once may be a moment only one side had, so all go on, up to three
    times as long, until each has met its best twice.
    """
    warm = {name: clock(work) for name, work in sides.items()}
    # the first call also builds and allocates, so how often to repeat is judged from a second one
    repeats = {name: max(1, int(least / max(clock(work), 1e-9))) if least else 1 for name, work in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for number in range(3 * rounds if confirm else rounds):
            if number >= rounds and all(met_twice(t) for t in taken.values()):
                break
            for name, work in sides.items():
                start = _clock()
                for _ in range(repeats[name]):
                    work()
                taken[name].append((_clock() - start) / repeats[name])
    finally:
        if gc_was_on:
            gc.enable()
    return {name: Times(min(t), sorted(t)[len(t) // 2], len(t), warm[name]) for name, t in taken.items()}


def met_twice(times: list[float]) -> bool:
    best, *others = sorted(times)
    return bool(others) and others[0] <= ALIKE * best


def best(work: Callable[[], Any], rounds: int = 5, least: float = 0.0) -> float:
    """Seconds of the best round of one piece of work."""
    return alternate({"it": work}, rounds, least)["it"].best
