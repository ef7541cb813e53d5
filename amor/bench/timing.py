"""Honest timing: sides measured in turn in one process, every round kept, the warm-up left out."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Times:
    """Seconds of one side, the warm-up apart. Sides that took turns have as many rounds each, and belong together by pairs."""

    best: float
    median: float
    rounds: tuple[float, ...]
    warm_up: float = 0.0
    by_laps: float | None = None  # the best of each lap together, which no whole round need have reached: a diagnostic

    def each(self, parts: int) -> "Times":
        """Of one part, where a round has so many equal ones."""
        return combined(lambda seconds: seconds / parts, self)


def of_rounds(rounds: Sequence[float], warm_up: float = 0.0, by_laps: float | None = None) -> Times:
    return Times(min(rounds), statistics.median(rounds), tuple(rounds), warm_up, by_laps)


def combined(what: Callable[..., float], *sides: Times) -> Times:
    """Seconds computed from those of sides that took turns: round by round, and from the best of each."""
    rounds = tuple(what(*each) for each in zip(*(side.rounds for side in sides), strict=True))
    laps = [side.by_laps for side in sides]
    by_laps = None if None in laps else what(*laps)
    return Times(what(*(side.best for side in sides)), statistics.median(rounds), rounds, by_laps=by_laps)


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


_laps: list[float] = []
_END = object()


def lap() -> None:
    """Ends a part of the work that is being timed: the best of each part over all rounds is kept too, as a diagnostic."""
    _laps.append(_clock())


def watch(model: nn.Module) -> None:
    """Mark a lap after every layer, forward and backward: a layer meets a quiet moment sooner than a whole step does."""

    def mark(_module: nn.Module, _args: Any, out: Any) -> None:
        lap()
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda _grad: lap())

    for part in model.modules():
        for layer in part if isinstance(part, nn.ModuleList) else ():
            layer.register_forward_hook(mark)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing is collected meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int = 5, least: float = 0.0) -> dict[str, Times]:
    """Each side in turn, `rounds` times; a side faster than `least` seconds is repeated inside a round to fill them.

    Other programs come and go on a shared machine. Taking turns spreads their harm over all sides: what lasts longer than a
    round harms every side of it alike, so that sides are compared round by round (amor/bench/ratio.py).
    """
    warm = {name: clock(work) for name, work in sides.items()}
    # the first call also builds and allocates, so how often to repeat is judged from a second one
    repeats = {name: max(1, int(least / max(clock(work), 1e-9))) if least else 1 for name, work in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    laps: dict[str, list[list[float]]] = {name: [] for name in sides}
    with undisturbed():
        for _ in range(rounds):
            for name, work in sides.items():
                _laps.clear()
                start = _clock()
                for _ in range(repeats[name]):
                    work()
                end = _clock()
                taken[name].append((end - start) / repeats[name])
                laps[name].append([b - a for a, b in pairwise([start, *_laps, end])])
    found = {}
    for name, times in taken.items():
        counts = {len(each) for each in laps[name]}
        marked = repeats[name] == 1 and len(counts) == 1 and counts != {1}
        found[name] = of_rounds(times, warm[name], sum(map(min, zip(*laps[name], strict=True))) if marked else None)
    return found


def interleaved(sides: Mapping[str, Callable[[], Iterator[Any]]], rounds: int = 5) -> dict[str, Times]:
    """Sides whose rounds come in pieces: each does one piece in turn, so that a disturbance of a second meets all of them.

    A round is the sum of its pieces, and rounds are compared as those of `alternate` are; a piece is a lap.
    """
    warm = {name: clock(lambda begin=begin: list(begin())) for name, begin in sides.items()}  # type: ignore[misc]
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    with undisturbed():
        for _ in range(rounds):
            pieces: dict[str, list[float]] = {name: [] for name in sides}
            going = {name: begin() for name, begin in sides.items()}
            while going:
                for name, work in list(going.items()):
                    start = _clock()
                    ended = next(work, _END) is _END
                    pieces[name].append(_clock() - start)
                    if ended:
                        del going[name]
            for name in sides:
                taken[name].append(pieces[name])
    laps = {name: sum(map(min, zip(*each, strict=True))) for name, each in taken.items()}
    return {name: of_rounds([sum(one) for one in each], warm[name], laps[name]) for name, each in taken.items()}


def best(work: Callable[[], Any], rounds: int = 5, least: float = 0.0) -> float:
    """Seconds of the best round of one piece of work."""
    return alternate({"it": work}, rounds, least)["it"].best
