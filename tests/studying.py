"""A study as a process of its own, whose programs are born by fork: what
they import is there already."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kills import BIRTH

from amor.cli import _training, main
from amor.experiment import jobs, judging, locked
from amor.experiment.jobs import Job


class Forked:
    """As much of a Popen as a study uses."""

    def __init__(self, job: Job, threads: int):
        self.returncode: int | None = None
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.pid = os.fork()
        if not self.pid:
            said_into(job.log)
            os.environ[jobs.PARENT] = str(os.getppid())
            _, flag, module, *words = job.command
            assert flag == "-m" and threads == 1, job.command
            ended(
                {"amor.experiment.locked": locked.main, "amor.experiment.judging": judging.main}[
                    module
                ],
                words,
            )

    def poll(self) -> int | None:
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


def said_into(log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)


def ended(verb: Callable[[list[str]], int], words: list[str]) -> None:
    code = 70
    try:
        code = verb(words)
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def study_alone(words: list[str], log: Path) -> None:
    os.setsid()
    said_into(log)
    jobs.start = Forked  # type: ignore[assignment]
    _training.gemm_rate = lambda: 100.0  # type: ignore[assignment]  # as fast as a machine of today
    ended(main, ["study", *words])


def begun(*words: object, log: Path) -> BIRTH.Process:  # type: ignore[name-defined, valid-type]
    process = BIRTH.Process(target=study_alone, args=([str(word) for word in words], log))
    process.start()
    return process


def finished(*words: object, log: Path) -> None:
    process = begun(*words, log=log)
    process.join()
    assert process.exitcode == 0, log.read_text()[-3000:]


def killed(*words: object, log: Path, after: Callable[[], bool], programs_too: bool) -> None:
    """kill -9 to a study once something is there: to all that it began, or to itself alone."""
    process = begun(*words, log=log)
    while not after():
        assert process.exitcode is None, log.read_text()[-3000:]
        time.sleep(0.005)
    (os.killpg if programs_too else os.kill)(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
