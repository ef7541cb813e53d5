"""Nonsense for every file and every command line: whatever is given, an answer or
one line that says what is wrong.

    python tests/fuzz.py --cases 10000            a long run; failures are printed with a command
                                                  that repeats them
    python tests/fuzz.py --only state --case 17   one case, its files kept

A case is one valid input with one or two things in it made wrong, and is a function of the
seed, the target and its number. Cases run in a process of their own: a traceback, a signal,
more than 10 s or more than 2 GB beyond what the process began with is a failure, and so is
an error of more than one line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nonsense import nodes

os.environ.setdefault("OMP_NUM_THREADS", "1")

SECONDS = 10.0
MEMORY = 2 << 30
WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload(["amor.train.loop", "amor.cli"])

NONSENSE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        2**31,
        2**63,
        2**64,
        10**12,
        10**30,
        -(2**63),
        0.5,
        -0.5,
        1e308,
        1e-308,
    ),
    *(
        "",
        "x",
        "mamba2",
        "../../etc/passwd",
        "/dev/null",
        "nan",
        "a\x00b",
        "ä" * 300,
        "{}",
        "\ud800",
        "1e400",
    ),
    *([], {}, [[]], [None], [1, 2, 3], {"x": 1}, {"": None}, [0] * 1000),
)


# --- what is done to an input


def spoiled(tree: Any, chance: random.Random) -> Any:
    """The tree with one node replaced, removed, doubled or renamed."""
    path = chance.choice(list(nodes(tree)))
    if not path:
        return deep(chance) if chance.random() < 0.2 else chance.choice(NONSENSE)
    tree = json.loads(json.dumps(tree))
    above = tree
    for key in path[:-1]:
        above = above[key]
    key, what = path[-1], chance.random()
    if what < 0.7:
        above[key] = chance.choice(NONSENSE)
    elif what < 0.75:
        above[key] = deep(chance)
    elif what < 0.87:
        del above[key]
    elif isinstance(above, dict):
        above[chance.choice(["x", "", str(key) + "s", "version", "__class__"])] = (
            above.pop(key) if what < 0.95 else above[key]
        )
    else:
        above.insert(key, above[key])
    return tree


def deep(chance: random.Random) -> Any:
    held: Any = 1
    for _ in range(chance.choice([10, 200, 900])):
        held = [held] if chance.random() < 0.5 else {"a": held}
    return held


def scratched(held: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or replaced."""
    where, what = chance.randrange(len(held) + 1), chance.random()
    if what < 0.3:
        return held[:where]
    if what < 0.6:
        return (
            held[:where]
            + bytes(chance.randrange(256) for _ in range(chance.choice([1, 8, 100])))
            + held[where + 1 :]
        )
    if what < 0.75:
        return held[:where] + held[where // 2 :]
    if what < 0.85:
        return chance.choice(
            [
                b"",
                b"\xff\xfe",
                b"\0" * 1000,
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"\xef\xbb\xbf" + held,
                b"null",
                b"NaN\n",
            ]
        )
    return (
        held[:where]
        + chance.choice([b"NaN", b"Infinity", b"null", b"-1", b"1e999", b'"', b"}", b"\n", b"\xc3"])
        + held[where:]
    )


def spoil_json(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.25:
        path.write_bytes(scratched(path.read_bytes(), chance))
    else:
        path.write_text(
            json.dumps(spoiled(json.loads(path.read_text()), chance)), errors="surrogatepass"
        )


def spoil_lines(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.25:
        path.write_bytes(scratched(path.read_bytes(), chance))
        return
    lines = path.read_text().splitlines()
    number = chance.randrange(len(lines))
    lines[number] = json.dumps(spoiled(json.loads(lines[number]), chance))
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")


def spoil_toml(path: Path, chance: random.Random) -> None:
    import tomllib

    if chance.random() < 0.25:
        path.write_bytes(scratched(path.read_bytes(), chance))
        return
    tree = spoiled(tomllib.loads(path.read_text()), chance)
    path.write_text(toml(tree if isinstance(tree, dict) else {"x": tree}), errors="replace")


def toml(tree: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(str(key))} = {toml_value(value)}\n" for key, value in tree.items())


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(str(k))} = {toml_value(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps("" if value is None else value)


def spoil_safetensors(path: Path, chance: random.Random) -> None:
    """The header as a tree, its numbers, or bytes anywhere."""
    held = path.read_bytes()
    size = struct.unpack("<Q", held[:8])[0]
    header, body, what = json.loads(held[8 : 8 + size]), held[8 + size :], chance.random()
    if what < 0.4:
        if what < 0.1 and "__metadata__" in header:  # what this program wrote into it
            name = chance.choice(list(header["__metadata__"]))
            inner = spoiled(json.loads(header["__metadata__"][name]), chance)
            header["__metadata__"][name] = json.dumps(inner) if chance.random() < 0.8 else "{"
        else:
            header = spoiled(header, chance)
        words = json.dumps(header).encode()
        path.write_bytes(
            struct.pack(
                "<Q",
                len(words) + (0 if what < 0.35 else chance.choice([1, 2**40, -1 % 2**64]) % 2**63),
            )
            + words
            + body
        )
    elif what < 0.6:
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        metadata = header.get("__metadata__")
        name = chance.choice(list(tensors))
        tensors[name] = respelled(tensors[name], chance)
        save_file({k: t.contiguous() for k, t in tensors.items() if t is not None}, path, metadata)
    elif what < 0.8:
        number = struct.pack("<f", chance.choice([math.nan, math.inf, -math.inf, 1e38, -1e38]))
        where = chance.randrange(max(len(body) // 4, 1)) * 4
        path.write_bytes(held[: 8 + size] + body[:where] + number + body[where + 4 :])
    else:
        path.write_bytes(scratched(held, chance))


def respelled(t: Any, chance: random.Random) -> Any:
    """A tensor of another type, shape or none."""
    import torch

    kinds = [
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
    ]
    what = chance.random()
    if what < 0.4:
        return t.to(chance.choice(kinds))
    if what < 0.5:
        return None
    if what < 0.6:
        return t.flatten()
    if what < 0.7:
        return t[:0]
    if what < 0.8:
        return t[..., :1]
    if what < 0.9:
        return torch.cat([t, t])
    return t[None]


# --- what is run

Act = Callable[[Path], int]  # in the folder of the case


def verb(*words: str) -> Act:
    def act(folder: Path) -> int:
        from amor.cli import main

        return main([word.replace("@", str(folder)) for word in words])

    return act


def read_on(folder: Path) -> int:
    """A State from a file, read on from by the steps of a model it may not be of."""
    import torch

    import amor
    from amor.errors import AmorError

    try:
        model = held_model(folder)
        session = amor.Engine(model).resume(amor.State.load(folder / "state"))
        session.step(torch.zeros(session.rows, dtype=torch.long))
        model(torch.zeros(session.rows, 2, dtype=torch.long), amor.State.load(folder / "state"))
    except AmorError as error:
        print(f"amor state: {error}", file=sys.stderr)
        return 2
    return 0


def held_model(folder: Path) -> Any:
    import amor

    return amor.load(folder / "model")[0]


def bars_of(folder: Path) -> int:
    sys.path.append(str(Path(__file__).parent.parent))  # benchmarks/ is not installed
    from amor.errors import AmorError
    from benchmarks import bars
    from benchmarks.__main__ import rows_of_suites

    try:
        bars.load(folder / "bars.toml", rows_of_suites())
    except AmorError as error:
        print(f"amor bars: {error}", file=sys.stderr)
        return 2
    return 0


GENERATE = ("--prompt", "ab c", "--max-tokens", "2", "--temperature", "0")
DRY = ("--data", "@/data", "--dry-run", "--flops", "1e10")


@dataclasses.dataclass(frozen=True)
class Target:
    """A file of the stock, how it is spoiled, and what then reads it."""

    needs: tuple[str, ...]  # of the stock
    file: str
    spoil: Callable[[Path, random.Random], None]
    acts: tuple[Act, ...]


RUN_FILES = {
    "metrics.jsonl": spoil_lines,
    "events.jsonl": spoil_lines,
    "config.json": spoil_json,
    "machine.json": spoil_json,
    "findings.json": spoil_json,
}
READS_RUN = (
    verb("report", "@/run", "--quick"),
    verb("report", "@/run", "@/run"),
    verb("info", "@/run"),
    verb("train", "@/recipe.toml", "--data", "@/data", "--out", "@/run", "--steps", "4"),
)
TARGETS: dict[str, Target] = {
    "config": Target(
        ("model",),
        "model/config.json",
        spoil_json,
        (verb("info", "@/model"), verb("generate", "@/model", *GENERATE)),
    ),
    "weights": Target(
        ("model",),
        "model/model.safetensors",
        spoil_safetensors,
        (verb("generate", "@/model", *GENERATE), verb("trace", "@/model", "--text", "ab c")),
    ),
    "tokenizer": Target(
        ("model",), "model/tokenizer.json", spoil_json, (verb("generate", "@/model", *GENERATE),)
    ),
    "recipe": Target(
        ("data", "recipe.toml"), "recipe.toml", spoil_toml, (verb("train", "@/recipe.toml", *DRY),)
    ),
    "manifest": Target(
        ("data", "recipe.toml"),
        "data/train/manifest.json",
        spoil_json,
        (
            verb("train", "@/recipe.toml", "--data", "@/data", "--out", "@/new", "--steps", "1"),
            verb("train", "@/recipe.toml", *DRY),
        ),
    ),
    "valid": Target(
        ("data", "recipe.toml"),
        "data/valid/manifest.json",
        spoil_json,
        (verb("train", "@/recipe.toml", *DRY),),
    ),
    "shard": Target(
        ("data", "recipe.toml"),
        "data/train/SHARD",
        lambda path, chance: path.write_bytes(scratched(path.read_bytes(), chance)),  # type: ignore[arg-type, return-value]
        (verb("train", "@/recipe.toml", "--data", "@/data", "--out", "@/new", "--steps", "1"),),
    ),
    "journal": Target(
        ("data", "texts"),
        "data/JOURNAL",
        spoil_json,
        (
            verb(
                "prepare",
                "@/texts",
                "--out",
                "@/data",
                "--tokenizer",
                "bytes",
                "--valid",
                "0.1",
                "--workers",
                "1",
            ),
        ),
    ),
    "state": Target(("model", "state"), "state", spoil_safetensors, (read_on,)),
    "bars": Target(("bars.toml",), "bars.toml", spoil_toml, (bars_of,)),
    "bench": Target(
        ("decode.json",), "decode.json", spoil_json, (verb("report", "@/decode.json"),)
    ),
    **{
        f"run/{name}": Target(("run", "data", "recipe.toml"), f"run/{name}", how, READS_RUN)
        for name, how in RUN_FILES.items()
    },
    "run/checkpoint": Target(
        ("run", "data", "recipe.toml"), "run/latest/ANY", spoil_json, READS_RUN[2:]
    ),
}

COMMANDS = (
    "info @/model",
    "info @/run",
    "info amor-mamba2 --scale tiny --set width=64",
    (
        "generate @/model --prompt ab --max-tokens 2 --temperature 0.8 --top-k 5 --top-p 0.9 "
        "--min-p 0.1 --seed 1 --rows 2"
    ),
    (
        "generate @/model --prompt ab --max-tokens 2 --gate always --weights int8 "
        "--repetition-penalty 1.1 --stop x --fire-rate 0.2"
    ),
    "generate @/model --batch @/prompts.txt --max-tokens 2 --out @/texts.jsonl",
    "trace @/model --text ab --limit 20 --gate never --out @/traced",
    "trace @/model --file @/prompts.txt --html @/trace.html --fire-rate 0.5",
    "trace @/model --value --data @/data/valid --windows 2 --context 8",
    "train @/recipe.toml --data @/data --dry-run --flops 1e10 --set lr.peak=1e-3",
    (
        "train @/recipe.toml --data @/data --dry-run --flops 1e10 --steps 5 "
        "--set model.name=transformer --set context=16"
    ),
    (
        "prepare @/texts --out @/prepared --tokenizer bytes --valid 0.1 --shard-tokens 1000 "
        "--workers 1 --separator x"
    ),
    (
        "prepare @/texts --out @/prepared --tokenizer bpe:300 --field text --errors replace "
        "--workers 1"
    ),
    "report @/run --quick --figure @/curves.svg",
    "report @/decode.json --figure @/decode.svg",
    "check amor-mamba2 --scale tiny --set width=64 --set vocab=50 --set pattern=mamba2",
    "bench ops --quick --rounds 1 --out @/ops.json --only nothing",
)
WORDS = (
    *(
        "",
        "x",
        "-1",
        "0",
        "1",
        "1e9",
        "10000000000",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "0.5",
        "99999999999999999999999",
        "0x10",
        "٣",
    ),
    *(
        "@",
        "@/none",
        "@/model",
        "@/prompts.txt",
        "/dev/null",
        "/dev/null/x",
        "a\0b",
        "n" * 300,
        "@/" + "n" * 300,
        "--",
        "-",
        "--help=1",
    ),
    *(
        "=",
        "a=b",
        "width=",
        "width=100000000000000000000",
        "vocab=1e12",
        "pattern=mamba2 x 100000000",
        "=1",
        "blocks.count=-1",
        "é",
        "\ud800",
    ),
)


def command(chance: random.Random) -> list[str]:
    words = chance.choice(COMMANDS).split()
    for _ in range(chance.choice([1, 1, 2])):
        where, what = chance.randrange(1, len(words)), chance.random()
        if what < 0.7:
            words[where] = chance.choice(WORDS)
        elif what < 0.8:
            del words[where]
            if len(words) == 1:
                break
        elif what < 0.9:
            words.insert(where, chance.choice(WORDS))
        else:
            words.insert(where, words[where])
    return words


# --- a stock of valid inputs, made once


def stock(folder: Path) -> Path:
    from training import corpus, small_recipe

    import amor
    from amor.cli import main
    from amor.records.run import Event
    from amor.run import Run

    data = corpus(folder / "made")
    shutil.copytree(data, folder / "data")
    shutil.copytree(folder / "made/texts", folder / "texts")
    recipe = small_recipe(folder / "data", steps=4)
    tree = recipe.to_dict() | {"data": ""}
    (folder / "recipe.toml").write_text(toml({k: v for k, v in tree.items() if v is not None}))
    assert (
        main(
            [
                "train",
                str(folder / "recipe.toml"),
                "--data",
                str(folder / "data"),
                "--out",
                str(folder / "run"),
            ]
        )
        == 0
    )
    Run(folder / "run").happened(Event(event="resumed", step=2))
    shutil.copytree((folder / "run/latest").resolve(), folder / "model")
    (folder / "model/tokenizer.json").exists() or shutil.copy(
        folder / "data/tokenizer.json", folder / "model/tokenizer.json"
    )
    model, _ = amor.load(folder / "model")
    amor.Engine(model).prefill([[1, 2, 3], [4, 5]]).state.save(folder / "state")
    shutil.copy(Path(__file__).parent.parent / "benchmarks" / "bars.toml", folder / "bars.toml")
    (folder / "prompts.txt").write_text("ab c\nde\n")
    words = (
        "bench decode --quick --models amor-mamba2,mamba2 --contexts 16 --fire-rates 0.5 "
        "--rounds 1 --out"
    )
    assert main([*words.split(), str(folder / "decode.json")]) == 0
    return folder


def laid_out(target: Target | None, stock: Path, folder: Path) -> None:
    names = (
        target.needs
        if target
        else (
            "model",
            "run",
            "data",
            "texts",
            "recipe.toml",
            "prompts.txt",
            "bars.toml",
            "decode.json",
        )
    )
    for name in names:
        if (stock / name).is_dir():
            shutil.copytree(stock / name, folder / name, symlinks=True)
        else:
            shutil.copy(stock / name, folder / name)


def found(folder: Path, name: str, chance: random.Random) -> Path:
    """The file of a target; some are found by looking."""
    place = folder / name
    if place.name == "SHARD":
        return chance.choice(sorted(p for p in place.parent.iterdir() if p.suffix != ".json"))
    if place.name == "JOURNAL":
        from amor.data.journal import JOURNAL

        return place.with_name(JOURNAL)
    if place.name == "ANY":
        return chance.choice(sorted(place.parent.glob("*.json")))
    return place


# --- cases


def play(name: str, number: int, seed: int, stock: Path, folder: Path) -> str:
    """Run a case; what is wrong with how it ended, or nothing."""
    chance = random.Random(f"{seed} {name} {number}")
    target = TARGETS.get(name)
    laid_out(target, stock, folder)
    if target is None:
        words = command(chance)
        act, said = verb(*words), " ".join(words)
    else:
        for _ in range(chance.choice([1, 1, 1, 2])):
            with contextlib.suppress(
                Exception
            ):  # spoilt before, so that it cannot be read to be spoilt again
                target.spoil(found(folder, target.file, chance), chance)
        act, said = chance.choice(target.acts), ""
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings_off(),
            standard_input(),
        ):
            os.chdir(folder)
            code = act(folder)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"traceback {said}\n{traceback.format_exc(limit=-6)}"
    lines = [line for line in err.getvalue().splitlines() if line.strip()]
    if code not in (0, 1, 2, 3) or any("a bug:" in line for line in lines):
        return f"exit code {code} {said}: {lines[-1:]}"
    if code == 2 and sum(line.startswith("amor") for line in lines) != 1:
        return f"not one line {said}: {lines}"
    if any(line.startswith("Traceback") for line in lines):
        return f"a traceback was printed {said}: {lines[-1]}"
    return ""


@contextlib.contextmanager
def warnings_off() -> Iterator[None]:
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        yield
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def standard_input() -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.StringIO("ab\n")
    yield
    sys.stdin = before


def serve(wire: Connection, seed: int, stock: Path) -> None:
    import torch

    torch.set_num_threads(1)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    while (case := wire.recv()) is not None:
        name, number = case
        with tempfile.TemporaryDirectory(prefix="amor-fuzz-") as folder:
            wire.send(play(name, number, seed, stock, Path(folder)))
            os.chdir("/")


class Worker:
    def __init__(self, seed: int, stock: Path):
        self.seed, self.stock = seed, stock
        self.wire, theirs = WORKERS.Pipe()
        self.process = WORKERS.Process(target=serve, args=(theirs, seed, stock), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, number: int) -> str:
        self.wire.send((name, number))
        try:
            if self.wire.poll(SECONDS * (1 + (self.process.exitcode is None and first(self)))):
                return str(self.wire.recv())
            self.end()
            return f"longer than {SECONDS:g} s"
        except (EOFError, ConnectionError):
            self.process.join()
            return f"ended by signal {-(self.process.exitcode or 0)}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()


def first(worker: Worker) -> bool:
    """Whether this is the first case of a worker, which also imports."""
    asked = getattr(worker, "asked", 0)
    worker.asked = asked + 1  # type: ignore[attr-defined]
    return asked == 0


def every_target() -> list[str]:
    return [*TARGETS, "command"]


def run(cases: int, seed: int, stock: Path, only: str = "") -> list[str]:
    """Failures, each with the words that repeat it. Targets take turns."""
    names = [name for name in every_target() if name.startswith(only)]
    failures: list[str] = []
    worker = Worker(seed, stock)
    began = time.monotonic()
    for index in range(cases):
        name, number = names[index % len(names)], index // len(names)
        wrong = worker.ask(name, number)
        if wrong:
            failures.append(
                f"python tests/fuzz.py --seed {seed} --only {name} --case {number}: {wrong}"
            )
        if not worker.alive:
            worker = Worker(seed, stock)
        if (index + 1) % 500 == 0:
            print(
                f"{index + 1} cases, {len(failures)} failures, {time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    worker.end()
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help=f"targets that begin so: {', '.join(every_target())}"
    )
    parser.add_argument("--case", type=int, help="this case of a target alone, in this process")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory(prefix="amor-stock-") as made:
        with contextlib.redirect_stdout(io.StringIO()):
            held = stock(Path(made))
        if args.case is not None:
            folder = Path(tempfile.mkdtemp(prefix="amor-case-"))
            print(
                play(args.only, args.case, args.seed, held, folder) or "nothing is wrong",
                folder,
                sep="\n",
            )
            return 0
        failures = run(args.cases, args.seed, held, args.only)
    for failure in failures:
        print(failure, end="\n\n")
    kinds = Counter(failure.split(": ", 1)[1].split()[0] for failure in failures)
    print(f"{args.cases} cases, {len(failures)} failures", dict(kinds) or "")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
