"""The suites by name, each run by what it needs: the harness, or the one loop that reads text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from amor import typed
from amor.errors import AmorError, nearest
from amor.eval import lengths, perplexity, texts
from amor.eval.judge import Judge
from amor.eval.run import Found, Subject, by_harness, conclude
from amor.models.amor import Amor
from amor.models.build import build
from amor.records.evals import Data, EvalSettings, Gates, LengthCurve, Phases
from amor.records.evals import Path as Way

LONG, HELD_OUT = "length-extrapolation", "perplexity"
NAMES = ("common-sense", "retrieval", "niah", "longbench", LONG, HELD_OUT)
NEEDLES = (1024, 2048, 4096)  # tokens of niah's prompts
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What a command wants of suites."""

    data: Path | None  # None: from the hub
    text: Path | None = None  # of `perplexity`
    tasks: list[str] | None = None  # None: all
    lengths: list[int] | None = None  # None: the paper's
    samples: int = 500
    segments: int = 50
    context: int = 0  # tokens a window of `perplexity`; 0: as it was trained
    seed: int = 0
    path: Way = "likelihood"
    max_length: int | None = None
    bos: bool = False
    limit: int | None = None

    def settings(self, gates: Gates) -> EvalSettings:
        return EvalSettings(gates=gates, path=self.path, max_length=self.max_length, bos=self.bos, limit=self.limit)


def untrained(model: Amor, seed: int) -> Amor:
    """The same shape with fresh weights."""
    return build(model.config, seed).eval()


def evaluate(subject: Subject, names: Sequence[str], ways: Sequence[Gates], asked: Asked) -> dict[str, Any]:
    """Every suite, with the gates run in every way; what was written where, and what was left out."""
    _known(names, asked.tasks)
    written: dict[str, list[str]] = {}
    skipped: dict[str, dict[str, str]] = {}
    for name in names:
        loaded = _load(subject, name, asked)
        skipped |= {name: loaded.skipped} if loaded.skipped else {}
        for task, why in loaded.skipped.items():
            say(subject, f"{name}: {task} is skipped: {why}")
        if not loaded.runs:
            say(subject, f"{name}: skipped, nothing of it can be run")
            continue
        for way in ways:
            began = time.perf_counter()
            path = loaded.run(asked.settings(way))
            if path is not None:
                written.setdefault(name, []).append(str(path))
                say(subject, f"{path} written, {time.perf_counter() - began:.0f} s")
    if not written and not subject.ranks.rank:
        raise AmorError(f"nothing was evaluated: {'; '.join(f'{n}: {w}' for each in skipped.values() for n, w in each.items())}")
    return {"folder": str(subject.out), "written": written, "skipped": skipped}


def say(subject: Subject, words: str) -> None:
    if not subject.ranks.rank:
        print(words, flush=True)


def _known(names: Sequence[str], tasks: Sequence[str] | None) -> None:
    """Refuse a task that none of the suites has."""
    from amor.eval.tasks import SUITES

    every: dict[str, list[str]] = {
        **{name: list(held) for name, held in SUITES.items()},
        LONG: list(texts.SETS),
        HELD_OUT: [HELD_OUT],
    }
    known = [task for name in names for task in every[name]]
    for task in tasks or ():
        if task not in known:
            raise AmorError(f"--task: no {task[:80]!r} in {', '.join(names)}; {nearest(task[:80], known)}")


@dataclass
class Ready:
    """A suite whose texts are at hand."""

    skipped: dict[str, str]
    runs: bool
    run: Callable[[EvalSettings], Path | None]


def _load(subject: Subject, name: str, asked: Asked) -> Ready:
    if name == LONG:
        return _long(subject, asked)
    if name == HELD_OUT:
        return _held_out(subject, asked)
    from amor.eval import tasks

    names = None if asked.tasks is None else [task for task in asked.tasks if task in tasks.SUITES[name]]
    loaded = tasks.load(
        name,
        asked.data,
        tokenizer=subject.tokenizer,
        lengths=asked.lengths or NEEDLES,
        seed=asked.seed,
        samples=asked.samples,
        names=names,
    )
    return Ready(
        loaded.skipped,
        bool(loaded.tasks),
        lambda settings: by_harness(subject, name, loaded, settings),
    )


def _long(subject: Subject, asked: Asked) -> Ready:
    wanted = [name for name in texts.SETS if asked.tasks is None or name in asked.tasks]
    found, skipped = texts.find(asked.data, wanted)
    sizes = tuple(asked.lengths or lengths.LENGTHS)
    count = min(asked.segments, asked.limit or asked.segments)
    held: dict[str, list[lengths.Span]] = {}

    def run(settings: EvalSettings) -> Path | None:
        for name, source in found.items():  # read once, when it is known that they are wanted
            if name not in held:
                held[name] = lengths.spans(subject.tokenizer, source, sizes, count, name)

        def ask(judge: Judge, concludes: bool) -> Found:
            curves: dict[str, LengthCurve] = {}
            data: dict[str, Data] = {}
            for name, spans in held.items():

                def read(places: list[int], spans: list[lengths.Span] = spans) -> Iterator[lengths.Segment]:
                    some = [spans[place] for place in places]
                    return lengths.each_segment(
                        subject.model,
                        some,
                        lengths=sizes,
                        gates=judge.scorer.gates,
                        on_tokens=judge.count_tokens,
                    )

                questions = [["length", span.ids.tolist(), list(sizes)] for span in spans]
                segments = kept(judge, name, questions, read, lengths.Segment)
                if concludes:
                    curves[name], data[name] = lengths.curve(segments), found[name].data(segments)
            return Found(tree_of({}, data), data, skipped, curves=curves)

        return conclude(subject, LONG, by_loop(settings), ask)

    return Ready(skipped, bool(found), run)


def _held_out(subject: Subject, asked: Asked) -> Ready:
    if asked.text is None:
        why = "name a text with --text: a folder that amor prepare wrote, a .txt or a .jsonl file"
        return Ready({HELD_OUT: why}, False, lambda settings: None)
    config = subject.model.config
    windows = perplexity.held_out(asked.text, subject.tokenizer, config.vocab, asked.context or config.context)
    count = min(len(windows), asked.limit or len(windows))
    text = asked.text

    def run(settings: EvalSettings) -> Path | None:
        def ask(judge: Judge, concludes: bool) -> Found | None:
            def read(places: list[int]) -> Iterator[perplexity.Window]:
                some = perplexity.at(windows, places)
                return perplexity.each_window(
                    subject.model,
                    subject.tokenizer,
                    some,
                    gates=judge.scorer.gates,
                    on_tokens=judge.count_tokens,
                )

            questions = [["window", windows.tokens[i].tolist(), windows.targets[i, -1:].tolist()] for i in range(count)]
            found = kept(judge, HELD_OUT, questions, read, perplexity.Window)
            if not concludes:
                return None
            data = {HELD_OUT: perplexity.data(text, windows)}
            return Found(
                tree_of({HELD_OUT: {"alias": HELD_OUT, **perplexity.metrics(found)}}, data),
                data,
                {},
            )

        return conclude(subject, HELD_OUT, by_loop(settings), ask)

    return Ready({}, True, run)


def kept(
    judge: Judge,
    task: str,
    questions: list[Any],
    compute: Callable[[list[int]], Iterator[T]],
    kind: type[T],
) -> list[T]:
    """Typed answers to questions about pieces of text, computed or from the store."""

    def told(places: list[int]) -> Iterator[tuple[int, Any, Phases]]:
        for place, one in zip(places, compute(places), strict=True):
            yield place, typed.tree(one), {"target": one.gates} if judge.scorer.gates else {}  # type: ignore[attr-defined]

    said = judge.answer("segment", [(task, question) for question in questions], told)
    return [typed.convert(kind, one, "the store of answers") for one in said if one is not None]


def by_loop(settings: EvalSettings) -> EvalSettings:
    """Of the settings those that a text read from its beginning to its end knows."""
    return msgspec.structs.replace(settings, path="likelihood", max_length=None, bos=False)


def tree_of(results: dict[str, Any], data: dict[str, Data]) -> dict[str, Any]:
    """Results of our own in the harness's layout."""
    return {
        "results": results,
        "n-samples": {task: {"original": one.rows, "effective": one.rows} for task, one in data.items()},
    }
