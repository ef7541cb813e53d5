"""Programs, several at a time: each has a log, and the ones that train hold the lock of their run as long as they live.

A job that fails does not stop the others; what it said last is kept. Asked to stop (Ctrl-C, SIGTERM), the programs are asked too,
and waited for: training writes a checkpoint. A program that a killed study left behind still holds its lock: it is waited for.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

POLL = 0.1  # seconds


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]
    log: Path
    lock: Path | None = None  # None: the program takes the locks it needs by itself


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Finished:
    job: Job
    code: int
    seconds: float

    @property
    def said(self) -> str:
        """The last line of the log."""
        lines = self.job.log.read_text(errors="replace").split("\n") if self.job.log.is_file() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


class Waited:
    """What is told while programs run."""

    def began(self, job: Job) -> None:
        """A program was started."""

    def ended(self, finished: Finished) -> None:
        """A program is over."""

    def turn(self, running: list[Running], waiting: list[Job]) -> None:
        """Now and then."""


def run(jobs: Iterable[Job], at_once: int, threads: int, told: Waited, needed: Callable[[Job], bool]) -> list[Finished]:
    """All of them, as many at once as allowed; `needed` is asked before one begins: another program may have done it."""
    waiting, running, done = list(jobs), list[Running](), list[Finished]()
    with stopping():
        try:
            while waiting or running:
                for job in list(waiting) if len(running) < at_once else ():
                    if len(running) < at_once and _begun(job, threads, running, told, needed):
                        waiting.remove(job)
                told.turn(running, waiting)
                time.sleep(POLL)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    done.append(Finished(one.job, one.process.returncode, time.monotonic() - one.began))
                    told.ended(done[-1])
        finally:
            _stop(running)
    return done


def _begun(job: Job, threads: int, running: list[Running], told: Waited, needed: Callable[[Job], bool]) -> bool:
    """True if a job is out of the queue: begun, or done by somebody else. False: somebody else is at it."""
    lock = None if job.lock is None else taken(job.lock)
    if job.lock is not None and lock is None:
        return False
    try:
        if needed(job):
            running.append(Running(job, start(job, threads, lock)))
            told.began(job)
    finally:
        if lock is not None:
            os.close(lock)  # the program has it now, and holds it until it ends
    return True


def start(job: Job, threads: int, lock: int | None) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=() if lock is None else (lock,),
        )


def taken(path: Path) -> int | None:
    """The lock of a run, or None where somebody else has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _stop(running: list[Running]) -> None:
    for one in running:
        one.process.terminate()
    for one in running:
        one.process.wait()


@contextmanager
def stopping() -> Iterator[None]:
    """SIGTERM is heard as Ctrl-C is; handlers live in the main thread only."""

    def heard(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, heard) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
