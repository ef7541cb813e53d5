"""Encodes many texts on many processes; what comes out does not depend on how many there are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from amor.data.encoder import Encoder
from amor.errors import AmorError
from amor.vocabulary import load_file

AHEAD = 4  # parcels a worker may be ahead: enough to keep it busy, and a bound on memory
_encoder: Encoder | None = None
Label = TypeVar("Label")


def encoded(
    parcels: Iterable[tuple[Label, list[str]]], tokenizer: Path, dtype: str, workers: int
) -> Iterator[tuple[Label, list[np.ndarray]]]:
    """Each parcel's label and the ids of its texts, in the order given. One worker means this
    process.
    """
    if workers == 1:
        encoder = Encoder(load_file(tokenizer), dtype)
        for label, texts in parcels:
            yield label, [encoder(text) for text in texts]
        return
    try:
        # spawn: a child does not inherit threads or locks of whatever the parent has loaded
        with ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _begin, (tokenizer, dtype)
        ) as pool:
            yield from _in_order(pool, parcels, AHEAD * workers)
    except BrokenProcessPool as error:
        raise AmorError(
            "a worker process died (out of memory?); run the same command again with fewer "
            "--workers"
        ) from error


def _in_order(
    pool: ProcessPoolExecutor, parcels: Iterable[tuple[Any, list[str]]], ahead: int
) -> Iterator[Any]:
    waiting: deque[tuple[Any, Future[list[np.ndarray]]]] = deque()
    for label, texts in parcels:
        waiting.append((label, pool.submit(_encode, texts)))
        if len(waiting) >= ahead:
            label, future = waiting.popleft()
            yield label, future.result()
    while waiting:
        label, future = waiting.popleft()
        yield label, future.result()


def _begin(tokenizer: Path, dtype: str) -> None:
    global _encoder
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent alone answers it
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # one thread a process: the processes are the parallelism
    )
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _encoder = Encoder(load_file(tokenizer), dtype)


def _leave_with_parent() -> None:
    """A parent that is killed closes no queue, and its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(texts: list[str]) -> list[np.ndarray]:
    assert _encoder is not None
    return [_encoder(text) for text in texts]
