"""One model through suites: tasks are loaded, answers computed or found in the store, results written beside each other.

    FOLDER/requests.jsonl            every answer, as it was found (store.py)
    FOLDER/<suite>.json              results in the harness's layout, and under `amor` where they come from (records/evals.py)
    FOLDER/samples_<suite>_<task>.jsonl   every document with what was answered, in the harness's form

Names end with .closed or .open before .json where all gates were closed or open, and .decode where the decode path was taken.
Several ranks share the work: each computes the requests whose keys are its own into a store of its own, then the first one reads
all of them and concludes. An answer's bits depend on its question alone, so they are the same for any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from amor import typed
from amor.data.progress import Progress as Bar
from amor.data.tokenizer import tokenizer_hash
from amor.eval.judge import Judge, RequestProgress
from amor.eval.store import Store
from amor.files import replace_file
from amor.models.amor import Amor
from amor.models.folder import resolve
from amor.records.evals import About, Data, EvalSettings, LengthCurve, Model, Timing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from amor.eval.tasks import Loaded

RESAMPLED = 1000  # times, for the standard errors of scores that are no means
PATIENCE = timedelta(days=7)  # of ranks that wait for one with more to read


@dataclass(frozen=True)
class Ranks:
    """Processes that share an evaluation, as torchrun starts them."""

    rank: int = 0
    count: int = 1

    @staticmethod
    @contextmanager
    def here() -> Iterator[Ranks]:
        """Those of this process, who leave together: one that ends while others still speak to it may be torn down."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            yield Ranks()
            return
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
        try:
            yield Ranks(torch.distributed.get_rank(), count)
            torch.distributed.barrier()
        finally:
            torch.distributed.destroy_process_group()

    def total(self, *numbers: int) -> list[int]:
        """Sums over all ranks, which wait here for each other."""
        held = torch.tensor(numbers)
        torch.distributed.all_reduce(held)
        return held.tolist()


@dataclass
class Subject:
    """A model to be judged."""

    model: Amor
    tokenizer: Tokenizer
    about: Model
    out: Path
    rows: int
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def fingerprint(self) -> str:
        return f"{self.about.fingerprint} {tokenizer_hash(self.tokenizer)}"

    def store(self) -> Store:
        """This rank's store, which knows what all have found."""
        own = self.out / ("requests.jsonl" if self.ranks.rank == 0 else f"requests.{self.ranks.rank}.jsonl")
        others = [path for path in sorted(self.out.glob("requests*.jsonl")) if path != own]
        return Store(own, others)


def fingerprint(model: Amor) -> str:
    """sha256 of the config and every tensor."""
    found = hashlib.sha256(model.config.to_json().encode())
    for name, tensor in sorted(model.state_dict().items()):
        held = tensor.detach().cpu().contiguous()
        found.update(f"{name} {held.dtype} {list(held.shape)}".encode())
        found.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def facts(model: Amor, folder: str, untrained: bool) -> Model:
    """What is known of a model: how far it was trained, where it lies in a run."""
    step = tokens = None
    if untrained:
        step = tokens = 0
    else:
        step, tokens = _trained(resolve(folder))
    return Model(
        name=f"{model.config.name}, untrained" if untrained else model.config.name,
        folder=folder,
        fingerprint=fingerprint(model),
        parameters=sum(p.numel() for p in model.parameters()),
        step=step,
        tokens=tokens,
    )


def _trained(folder: Path) -> tuple[int | None, int | None]:
    """Steps and tokens of a checkpoint inside its run, where it lies in one."""
    folder = folder.resolve()
    steps, metrics = folder.name.removeprefix("step-"), folder.parent.parent / "metrics.jsonl"
    if folder.parent.name != "checkpoints" or not steps.isdigit() or not metrics.is_file():
        return None, None
    for line in metrics.read_bytes().splitlines():
        try:
            found = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError:
            continue
        if found.step == int(steps):
            return found.step, found.tokens
    return int(steps), None


class _Line(msgspec.Struct):
    step: int
    tokens: int


class Shown:
    """A bar a kind of request."""

    def __init__(self, words: str):
        self.words, self.bar = words, None

    def begin(self, kind: str, count: int, known: int) -> None:
        self.end()
        self.bar = Bar(f"{self.words}: {kind}", count - known, "requests").__enter__()

    def step(self, done: int) -> None:
        assert self.bar is not None
        self.bar.add(done)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.__exit__(None, None, None)
            self.bar = None

    bar: Bar | None


def suffix(settings: EvalSettings) -> str:
    return (".decode" if settings.path == "decode" else "") + ("" if settings.gates == "model" else f".{settings.gates}")


@dataclass(frozen=True)
class Found:
    """What a suite comes to: results in the harness's layout, and what is told of them."""

    tree: dict[str, Any]
    data: dict[str, Data]
    skipped: dict[str, str]
    samples: dict[str, list[Any]] = field(default_factory=dict)  # by task
    curves: dict[str, LengthCurve] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)


def conclude(subject: Subject, suite: str, settings: EvalSettings, ask: Callable[[Judge, bool], Found | None]) -> Path | None:
    """A suite asked of a model, its answers shared by ranks, and its file, on the rank that concludes.

    ask(judge, concludes): with concludes every answer is known or computed; without it those of other ranks are missing."""
    began = time.perf_counter()

    def asked(ranks: Ranks) -> tuple[Judge, Found | None]:
        shown = Shown(f"{suite}{suffix(settings)}" + (f", rank {ranks.rank}" if ranks.count > 1 else ""))
        with subject.store() as store:
            judge = Judge(
                subject.model,
                subject.tokenizer,
                subject.fingerprint,
                store,
                settings,
                subject.rows,
                ranks.rank,
                ranks.count,
                RequestProgress(shown.begin, shown.step),
            )
            try:
                return judge, ask(judge, ranks.count == 1)
            finally:
                shown.end()

    computed = tokens = 0
    if subject.ranks.count > 1:
        part, _ = asked(subject.ranks)
        computed, tokens = subject.ranks.total(part.computed, part.tokens)
        if subject.ranks.rank:
            return None
    judge, found = asked(Ranks())
    assert found is not None
    about = About(
        suite=suite,
        model=subject.about,
        tokenizer=tokenizer_hash(subject.tokenizer),
        settings=settings,
        data=found.data,
        gates=judge.gates,
        timing=Timing(
            seconds=time.perf_counter() - began,
            computed=judge.computed + computed,
            reused=judge.reused - computed,
            tokens=judge.tokens + tokens,
        ),
        curves=found.curves,
        lengths=found.lengths,
        skipped=found.skipped,
    )
    for task, rows in found.samples.items():
        lines = [json.dumps(row, default=_plain, ensure_ascii=False) for row in rows]
        replace_file(subject.out / f"samples_{suite}_{task}{suffix(settings)}.jsonl", "\n".join(lines) + "\n")
    path = subject.out / f"{suite}{suffix(settings)}.json"
    # what is not a number is null, and what JSON cannot hold is a text, as the harness has it
    plain = json.loads(json.dumps(found.tree, default=_plain), parse_constant=lambda word: None)
    replace_file(
        path,
        json.dumps({**plain, "amor": typed.tree(about)}, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    )
    return path


def by_harness(subject: Subject, suite: str, loaded: Loaded, settings: EvalSettings) -> Path | None:
    """The tasks of a suite through the harness."""
    import lm_eval

    from amor.eval import harness
    from amor.eval.lm import AmorLM

    def ask(judge: Judge, concludes: bool) -> Found:
        resampled = RESAMPLED if concludes else 0
        tree = harness.evaluated(AmorLM(judge), loaded.tasks, settings.limit, resampled, samples=concludes)
        return Found(tree, loaded.data, loaded.skipped, tree.pop("samples", {}), lengths=loaded.lengths)

    return conclude(subject, suite, msgspec.structs.replace(settings, harness=lm_eval.__version__), ask)


def _plain(value: Any) -> Any:
    """What the harness's results hold besides JSON: numbers of numpy, functions of its configs."""
    return value.item() if isinstance(value, np.generic) else str(value)
