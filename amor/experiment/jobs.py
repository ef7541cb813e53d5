"""Runs programs, several at a time, each with a log of its own.

A program that fails does not stop the others; the last line of its log is kept. On Ctrl-C or
SIGTERM the programs get SIGTERM and are waited for: training writes a checkpoint. A program whose
study was killed ends the same way (`end_with_parent`); until it has, it holds the lock of its run,
and the job of another study waits.
"""

from __future__ import annotations

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

from filelock import FileLock, Timeout

POLL = 0.1  # seconds
PARENT = "AMOR_STUDY_PID"  # environment variable of a program: the process that started it
ORPHAN_POLL = 0.5  # seconds between two looks of a program at its parent


@dataclass(frozen=True)
class Job:
    """A program to be run. lock: the file that the program locks while it lives
    (amor.experiment.locked); None: none."""

    name: str
    command: tuple[str, ...]
    log: Path
    lock: Path | None = None


@dataclass
class RunningJob:
    """A program that was started, and when (time.monotonic)."""

    job: Job
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class FinishedJob:
    """A program that ended, and the seconds it took."""

    job: Job
    code: int  # exit code of the program
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line of the log."""
        log = self.job.log
        lines = log.read_text(errors="replace").strip().split("\n") if log.is_file() else [""]
        return lines[-1].strip() or "nothing"


class JobObserver:
    """Is called while programs run."""

    def on_start(self, job: Job) -> None:
        """A program was started."""

    def on_end(self, finished: FinishedJob) -> None:
        """A program ended."""

    def on_tick(self, running: list[RunningJob], waiting: list[Job]) -> None:
        """Every POLL seconds."""


def run(
    jobs: Iterable[Job],
    at_once: int,
    threads: int,
    observer: JobObserver,
    needed: Callable[[Job], bool],
) -> list[FinishedJob]:
    """Run all of them, at most `at_once` at a time; `needed` is checked before one starts: another
    study may have done it."""
    waiting, running, done = list(jobs), list[RunningJob](), list[FinishedJob]()
    with sigterm_interrupts():
        try:
            while waiting or running:
                for job in list(waiting):
                    if len(running) < at_once and not (job.lock and is_locked(job.lock)):
                        waiting.remove(job)
                        if needed(job):
                            running.append(RunningJob(job, start(job, threads)))
                            observer.on_start(job)
                observer.on_tick(running, waiting)
                time.sleep(POLL)
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    took = time.monotonic() - each.began
                    done.append(FinishedJob(each.job, each.process.returncode, took))
                    observer.on_end(done[-1])
        finally:
            for each in running:
                each.process.terminate()
            for each in running:
                each.process.wait()
    return done


def start(job: Job, threads: int) -> subprocess.Popen[bytes]:
    """Start a program whose output is appended to its log."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, PARENT: os.getpid()}
    env = os.environ | {name: str(value) for name, value in environment.items()}
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
        )


def end_with_parent() -> None:
    """Send SIGTERM to this program once the study that started it is gone, kill -9 included.

    A thread compares the parent's process id with that in the environment, so it works wherever
    Python does. A program that no study started is left alone.
    """
    parent = int(os.environ.get(PARENT, 0))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_POLL)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def is_locked(path: Path) -> bool:
    """Whether another program holds a lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does; signal handlers live in the main thread
    only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)
