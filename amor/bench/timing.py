"""Honest timing: sides measured in turn in one process, the best of several kept, the warm-up left out."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


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


_laps: list[float] = []


def lap() -> None:
    """Ends a part of the work that is being timed. Work whose parts are marked is as fast as the best of each together."""
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


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int = 5, least: float = 0.0) -> dict[str, Times]:
    """Each side in turn, `rounds` times; a side faster than `least` seconds is repeated inside a round to fill them.

    Other programs come and go on a shared machine. Taking turns spreads their harm over all sides; the best round is the
    one they harmed least, or where laps are marked the best of each lap.
    """
    warm = {name: clock(work) for name, work in sides.items()}
    # the first call also builds and allocates, so how often to repeat is judged from a second one
    repeats = {name: max(1, int(least / max(clock(work), 1e-9))) if least else 1 for name, work in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    laps: dict[str, list[list[float]]] = {name: [] for name in sides}
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, work in sides.items():
                _laps.clear()
                start = _clock()
                for _ in range(repeats[name]):
                    work()
                end = _clock()
                taken[name].append((end - start) / repeats[name])
                laps[name].append([b - a for a, b in pairwise([start, *_laps, end])])
    finally:
        if gc_was_on:
            gc.enable()
    found = {}
    for name, times in taken.items():
        even = repeats[name] == 1 and len({len(each) for each in laps[name]}) == 1
        fastest = sum(map(min, zip(*laps[name], strict=True))) if even else min(times)
        found[name] = Times(fastest, sorted(times)[len(times) // 2], rounds, warm[name])
    return found


def best(work: Callable[[], Any], rounds: int = 5, least: float = 0.0) -> float:
    """Seconds of the best round of one piece of work."""
    return alternate({"it": work}, rounds, least)["it"].best
