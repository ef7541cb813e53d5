"""A fuzzer: whatever a file or a command line holds, there must be an answer, or one line that
names what is wrong.

    python -m tests.fuzz --cases 10000 --seed 0 --jobs 2    a long run
    python -m tests.fuzz --only convert --cases 500         surfaces whose names begin so
    python -m tests.fuzz --replay fuzz-failures/state-17    one failure again, with its traceback

A case is one valid input with one or two things in it made wrong (tests/nonsense.py), and is a
function of the seed, the surface (tests/fuzz_surfaces.py) and its number. A server process imports
everything once and forks for each case. A traceback, a signal, more than SECONDS or more than
MEMORY, and an error of more than one line are failures. Each is written to a folder with the inputs
as they were before the command ran. Once the valid inputs are made they are run as they are: they
must succeed, or a surface would be tested with files that are refused for another reason.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import multiprocessing
import os
import queue
import random
import resource
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import fuzz_surfaces as surfaces  # noqa: E402
from nonsense import spoil  # noqa: E402

SECONDS = 20.0  # of a processor per case; three times as many by the clock
MEMORY = 2 << 30  # bytes beyond what the server has
SERVERS = multiprocessing.get_context("spawn")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # as in conftest.py
}
PRELOADED = (
    *("amor.train.loop", "amor.hf", "amor.eval.harness", "amor.eval.lm", "matplotlib.pyplot"),
    *("transformers.models.mamba2.modeling_mamba2", "transformers.models.llama.modeling_llama"),
    *("datasets", "training", "test_convert", "test_convert_llama2c", "studying"),
    *("evaluations", "eval_rows"),
)
KINDS = ("success", "one line", "traceback", "signal", "hang", "other")
GOOD = KINDS[:2]


@dataclass(frozen=True)
class Case:
    """A surface and a number; number -1 - n is its n-th act with inputs as they are."""

    surface: str
    number: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.surface.replace('/', '-')}-{self.number}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended: one of KINDS, the words that were run, and what was seen."""

    kind: str
    words: tuple[str, ...] = ()
    message: str = ""
    seconds: float = 0.0  # of a processor


# --- one case, in a process of its own


def lay_out(case: Case, stock: Path, folder: Path) -> tuple[str, ...]:
    """Write the inputs of a case; the words that read them, with @ for the folder."""
    chance = random.Random(f"{case.seed} {case.surface} {case.number}")
    for name in surfaces.needs(case.surface):
        if (stock / name).is_dir():
            shutil.copytree(stock / name, folder / name, symlinks=True)
        else:
            shutil.copy(stock / name, folder / name)
    surface = surfaces.SURFACES.get(case.surface)
    if surface is None:
        verb = case.surface.removeprefix("command/")
        if case.number < 0:
            return tuple(surfaces.COMMANDS[verb][-1 - case.number].split())
        return tuple(surfaces.command(verb, chance))
    files = sorted({path for pattern in surface.spoils for path in folder.glob(pattern)})
    file = chance.choice([path for path in files if path.is_file()])
    for _ in range(chance.choice([1, 1, 1, 2]) if case.number >= 0 else 0):
        with contextlib.suppress(Exception):  # spoiled before, so that it cannot be read again
            spoil(file, chance)
    act = surface.acts[-1 - case.number] if case.number < 0 else chance.choice(surface.acts)
    if "{task}" in act:
        suite, task = surfaces.task_of(file.name.partition(".")[0])
        act = act.replace("{suite}", suite).replace("{task}", task)
    return tuple(shlex.split(act))


def play(words: tuple[str, ...], folder: Path) -> Outcome:
    """Run words in the folder of a case."""
    out, err, bugs = io.StringIO(), io.StringIO(), []
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            bugs_noted(bugs),
            quiet(),
        ):
            code = act(words, folder)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        return Outcome("traceback", words, traceback.format_exc(limit=-8))
    lines = [line for line in err.getvalue().splitlines() if line.strip()]
    if bugs:
        return Outcome("traceback", words, bugs[-1])
    if any(line.startswith("Traceback") for line in lines):
        return Outcome("traceback", words, err.getvalue()[-3000:])
    if code not in (0, 1, 2, 3):
        return Outcome("other", words, f"exit code {code}: {lines[-1:]}")
    if code == 2 and sum(line.startswith("amor") for line in lines) != 1:
        return Outcome("other", words, f"not one line: {lines}")
    return Outcome("one line" if code == 2 else "success", words, "\n".join(lines))


def act(words: tuple[str, ...], folder: Path) -> int:
    """A command line, or a function of fuzz_surfaces; the exit code."""
    if words[0] == "python":
        return surfaces.PYTHON[words[1]](folder)
    from amor.cli import main

    return main([word.replace("@", str(folder)) for word in words])


@contextlib.contextmanager
def bugs_noted(bugs: list[str]) -> Iterator[None]:
    """Keep the traceback of what the command line reports as a bug in one line."""
    from amor import cli

    failed = cli.failed

    def noted(args: argparse.Namespace, message: str, code: int) -> int:
        if code == cli.BUG:
            bugs.append(traceback.format_exc(limit=-8))
        return failed(args, message, code)

    cli.failed = noted
    yield
    cli.failed = failed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, no log, and a line on standard input."""
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        before, sys.stdin = sys.stdin, io.StringIO("ab\n")
        yield
        sys.stdin = before
        logging.disable(logging.NOTSET)


def limited() -> None:
    """Limits of this process, which is one case."""
    os.setsid()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = time.process_time()
    seconds = int(used + SECONDS) + 1
    # SIGXCPU at the soft limit tells a hang; at the hard limit it is SIGKILL
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


# --- the server


def in_child(work: Callable[[], Outcome], noise: Path) -> Outcome:
    """Work done by a fork of this process, and how that ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            handle = os.open(noise, os.O_WRONLY | os.O_CREAT)
            os.dup2(handle, 1), os.dup2(handle, 2)
            try:
                outcome = work()
            except BaseException:
                outcome = Outcome("other", message=traceback.format_exc())
            os.write(writer, json.dumps(asdict(outcome)).encode())
        os._exit(0)
    os.close(writer)
    late, deadline, answer = False, time.monotonic() + 3 * SECONDS, b""
    while not late:
        late = not select.select([reader], [], [], max(deadline - time.monotonic(), 0))[0]
        part = b"" if late else os.read(reader, 1 << 16)
        answer += part
        if not part:
            break
    os.close(reader)
    if late:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it may have started
    if late or -status == signal.SIGXCPU:
        return Outcome("hang", message=f"longer than {SECONDS:g} s")
    if status < 0:
        seen = noise.read_text(errors="replace")[-2000:]
        return Outcome("signal", message=f"signal {-status} {seen}")
    if not answer:
        return Outcome("other", message="ended without an answer")
    tree = json.loads(answer)
    return Outcome(**tree | {"words": tuple(tree["words"])})


def run_case(case: Case, stock: Path, keep: Path | None) -> Outcome:
    """A case in a fork of this process; a failure is kept in a folder."""
    with tempfile.TemporaryDirectory(prefix="amor-fuzz-") as made:
        folder, noise = Path(made) / "case", Path(made) / "noise"
        folder.mkdir()

        def work() -> Outcome:
            words = lay_out(case, stock, folder)
            limited()
            return play(words, folder)

        before = children_seconds()
        outcome = in_child(work, noise)
        outcome = replace(outcome, seconds=children_seconds() - before)
    if outcome.kind not in GOOD and keep is not None:
        inputs = keep / case.name / "inputs"
        shutil.rmtree(keep / case.name, ignore_errors=True)
        inputs.mkdir(parents=True)
        laid = in_child(lambda: Outcome("", lay_out(case, stock, inputs)), Path(os.devnull))
        outcome = replace(outcome, words=laid.words)
        tree = {"case": asdict(case), **asdict(outcome)}
        (keep / case.name / "case.json").write_text(json.dumps(tree, indent=1))
    return outcome


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def serve(wire: Connection) -> None:
    """Import everything, then run cases until there are no more."""
    import importlib

    import torch

    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # a collection in a child would copy the pages of everything that was imported
    while (job := wire.recv()) is not None:
        wire.send(run_case(*job) if isinstance(job[0], Case) else stocked(*job))


def stocked(folder: Path) -> Outcome:
    """Make the stock, in a fork that may use more time than a case."""

    def work() -> Outcome:
        try:
            with contextlib.redirect_stdout(io.StringIO()), quiet():
                surfaces.make_stock(folder)
        except BaseException:
            return Outcome("traceback", message=traceback.format_exc())
        return Outcome("success")

    global SECONDS
    before, SECONDS = SECONDS, 600.0
    outcome = in_child(work, folder / "noise")
    SECONDS = before
    return outcome


class Server:
    """The process that forks, seen from outside."""

    def __init__(self) -> None:
        os.environ.update({key: os.environ.get(key, word) for key, word in ENVIRONMENT.items()})
        self.wire, theirs = SERVERS.Pipe()
        self.process = SERVERS.Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def ask(self, *job: object) -> Outcome:
        self.wire.send(job)
        return self.wire.recv()

    def make_stock(self, folder: Path) -> Path:
        outcome = self.ask(folder)
        assert outcome.kind == "success", outcome.message
        return folder

    def end(self) -> None:
        self.wire.send(None)
        self.process.join()


@contextlib.contextmanager
def servers(jobs: int) -> Iterator[list[Server]]:
    """So many servers, ended with the block."""
    begun = [Server() for _ in range(jobs)]
    try:
        yield begun
    finally:
        for server in begun:
            server.end()


# --- many cases


def sound_cases(only: str = "") -> list[Case]:
    """Every act of every surface, with inputs as they are."""
    acts = {name: len(surface.acts) for name, surface in surfaces.SURFACES.items()}
    acts |= {f"command/{verb}": len(lines) for verb, lines in surfaces.COMMANDS.items()}
    return [
        Case(name, -1 - n)
        for name, count in acts.items()
        if name.startswith(only) and name != "command/bench"  # refused, as measuring takes long
        for n in range(count)
    ]


def spoiled_cases(count: int, seed: int, only: str = "") -> Iterable[Case]:
    """So many cases; the surfaces take turns."""
    names = [name for name in surfaces.names() if name.startswith(only)]
    turns = (Case(name, number, seed) for number in itertools.count() for name in names)
    return itertools.islice(turns, count)


def run(
    cases: Iterable[Case], stock: Path, at_work: list[Server], keep: Path | None = None
) -> list[tuple[Case, Outcome]]:
    """Outcomes of all cases, in their order; progress on standard error."""
    free: queue.Queue[Server] = queue.Queue()
    for server in at_work:
        free.put(server)
    began = time.monotonic()

    def one(case: Case) -> tuple[Case, Outcome]:
        server = free.get()
        try:
            return case, server.ask(case, stock, keep)
        finally:
            free.put(server)

    ended = []
    with ThreadPoolExecutor(len(at_work)) as pool:
        for case, outcome in pool.map(one, cases):
            ended.append((case, outcome))
            if len(ended) % 500 == 0:
                bad = sum(outcome.kind not in GOOD for _, outcome in ended)
                spent = time.monotonic() - began
                print(f"{len(ended)} cases, {bad} failures, {spent:.0f} s", file=sys.stderr)
    return ended


def is_failure(case: Case, outcome: Outcome) -> bool:
    """Whether a case ended as it must not; sound inputs must succeed."""
    return outcome.kind not in (GOOD if case.number >= 0 else GOOD[:1])


def summary(ended: list[tuple[Case, Outcome]]) -> str:
    """A table: how many cases of each surface ended in which way, and seconds of a processor."""
    rows: dict[str, Counter[str]] = {"all": Counter()}
    for case, outcome in ended:
        for name in (case.surface, "all"):
            counts = rows.setdefault(name, Counter())
            counts.update({outcome.kind: 1, "cases": 1, "seconds": outcome.seconds})
    rows["all"] = rows.pop("all")
    columns, width = ("cases", *KINDS, "seconds"), max(map(len, rows))
    lines = [" ".join([f"{'surface':<{width}}", *(f"{column:>9}" for column in columns)])]
    for name, counts in rows.items():
        numbers = (f"{counts[column]:>9.0f}" for column in columns)
        lines.append(" ".join([f"{name:<{width}}", *numbers]))
    return "\n".join(lines)


def described(case: Case, outcome: Outcome, keep: Path) -> str:
    """A failure in words, and how to repeat it."""
    replay = f"python -m tests.fuzz --replay {keep / case.name}"
    words = " ".join(outcome.words).encode("ascii", "backslashreplace").decode()
    return f"{replay}\n  {outcome.kind}: {words[:300]}\n  {outcome.message[-1500:]}"


def replay(folder: Path) -> Outcome:
    """A failure again, in this process, on a copy of its inputs."""
    tree = json.loads((folder / "case.json").read_text())
    copied = Path(tempfile.mkdtemp(prefix="amor-case-")) / "case"
    shutil.copytree(folder / "inputs", copied, symlinks=True)
    print(f"inputs copied to {copied}")
    return play(tuple(tree["words"]), copied)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--only", default="", help=f"of {', '.join(surfaces.names())}")
    parser.add_argument("--keep", default="fuzz-failures", help="where failures are written")
    parser.add_argument("--stock", type=Path, help="valid inputs; made unless they are there")
    parser.add_argument("--replay", type=Path, help="a failure to be run again")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if args.replay:
        outcome = replay(args.replay)
        print(f"{outcome.kind}: {outcome.message}")
        return outcome.kind not in GOOD
    keep = Path(args.keep)
    with servers(args.jobs) as at_work, tempfile.TemporaryDirectory(prefix="amor-stock-") as made:
        stock = args.stock or Path(made)
        sound = []
        if not (stock / "study").exists():
            stock.mkdir(parents=True, exist_ok=True)
            at_work[0].make_stock(stock)
            sound = run(sound_cases(args.only), stock, at_work)
        ended = run(spoiled_cases(args.cases, args.seed, args.only), stock, at_work, keep)
    failures = [one for one in (*sound, *ended) if is_failure(*one)]
    for failure in failures:
        print(described(*failure, keep), end="\n\n")
    print(summary(ended or sound))
    print(f"{len(ended)} cases, {len(failures)} failures; seed {args.seed}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
