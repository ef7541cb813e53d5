"""`amor eval`: every suite by what runs it, lm-evaluation-harness or the one loop over text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from amor import typed
from amor.errors import AmorError, nearest
from amor.eval import lengths, perplexity, tasks, texts
from amor.eval.judge import Judge
from amor.eval.run import SuiteOutcome, run_by_harness, run_suite
from amor.eval.subject import EvalSubject
from amor.eval.tasks import HELD_OUT, LENGTHS, NEEDLE_LENGTHS
from amor.models.amor import Amor
from amor.models.build import build
from amor.records.evals import Data, EvalSettings, Gates, LengthCurve, Phases
from amor.records.evals import Path as EvalPath

T = TypeVar("T", lengths.Segment, perplexity.Window)


@dataclass(frozen=True)
class EvalRequest:
    """The options of `amor eval`."""

    data: Path | None  # folder of local files; None: the hub
    text: Path | None = None  # of `perplexity`
    tasks: list[str] | None = None  # None: all
    lengths: list[int] | None = None  # in tokens; None: the paper's
    samples: int = 500  # needle prompts per length, as in the paper
    segments: int = 50  # texts per set of length-extrapolation
    context: int = 0  # tokens per window of `perplexity`; 0: the training context
    seed: int = 0
    path: EvalPath = "likelihood"
    max_length: int | None = None  # tokens of a request; None: not limited
    bos: bool = False
    limit: int | None = None  # documents per task; None: all

    def settings(self, gates: Gates) -> EvalSettings:
        """What scores depend on."""
        return EvalSettings(
            gates=gates, path=self.path, max_length=self.max_length, bos=self.bos, limit=self.limit
        )


def untrained(model: Amor, seed: int) -> Amor:
    """A model of the same config with fresh weights."""
    return build(model.config, seed).eval()


def evaluate(
    subject: EvalSubject, names: Sequence[str], ways: Sequence[Gates], request: EvalRequest
) -> dict[str, Any]:
    """Evaluate every suite with the gates in every way; the files written, and the tasks
    skipped."""
    _check_tasks(names, request.tasks)
    written: dict[str, list[str]] = {}
    skipped: dict[str, dict[str, str]] = {}
    for name in names:
        ready = _prepare(subject, name, request)
        skipped |= {name: ready.skipped} if ready.skipped else {}
        for task, why in ready.skipped.items():
            log(subject, f"{name}: {task} is skipped: {why}")
        if not ready.runs:
            log(subject, f"{name}: skipped, nothing of it can be run")
            continue
        for way in ways:
            began = time.perf_counter()
            path = ready.run(request.settings(way))
            if path is not None:
                written.setdefault(name, []).append(str(path))
                log(subject, f"{path} written, {time.perf_counter() - began:.0f} s")
    if not written and not subject.ranks.rank:
        reasons = "; ".join(f"{n}: {w}" for each in skipped.values() for n, w in each.items())
        raise AmorError(f"nothing was evaluated: {reasons}")
    return {"folder": str(subject.out), "written": written, "skipped": skipped}


def log(subject: EvalSubject, words: str) -> None:
    """Print a line on rank 0."""
    if not subject.ranks.rank:
        print(words, flush=True)


def _check_tasks(names: Sequence[str], given: Sequence[str] | None) -> None:
    """An error for a task that none of the suites has."""
    known = [task for name in names for task in tasks.in_suite(name)]
    for task in given or ():
        if task not in known:
            raise AmorError(
                f"--task: no {task[:80]!r} in {', '.join(names)}; {nearest(task[:80], known)}"
            )


@dataclass
class ReadySuite:
    """A suite whose texts are at hand."""

    skipped: dict[str, str]  # tasks, and why
    runs: bool  # whether any task is left
    run: Callable[[EvalSettings], Path | None]


def _prepare(subject: EvalSubject, name: str, request: EvalRequest) -> ReadySuite:
    if name == LENGTHS:
        return _length_extrapolation(subject, request)
    if name == HELD_OUT:
        return _held_out_text(subject, request)
    known = tasks.in_suite(name)
    loaded = tasks.load(
        name,
        request.data,
        tokenizer=subject.tokenizer,
        lengths=request.lengths or NEEDLE_LENGTHS,
        seed=request.seed,
        samples=request.samples,
        names=None if request.tasks is None else [task for task in request.tasks if task in known],
    )
    run = lambda settings: run_by_harness(subject, name, loaded, settings)  # noqa: E731
    return ReadySuite(loaded.skipped, bool(loaded.tasks), run)


def _length_extrapolation(subject: EvalSubject, request: EvalRequest) -> ReadySuite:
    wanted = [n for n in tasks.in_suite(LENGTHS) if request.tasks is None or n in request.tasks]
    sources, skipped = texts.find(request.data, wanted)
    sizes = tuple(request.lengths or lengths.LENGTHS)
    count = min(request.segments, request.limit or request.segments)
    spans: dict[str, list[lengths.Span]] = {}

    def run(settings: EvalSettings) -> Path | None:
        for name, source in sources.items():  # once for all ways of running gates
            if name not in spans:
                spans[name] = lengths.spans(subject.tokenizer, source, sizes, count, name)

        def ask(judge: Judge, complete: bool) -> SuiteOutcome:
            curves: dict[str, LengthCurve] = {}
            data: dict[str, Data] = {}
            for name in spans:
                segments = _segments(judge, name, spans[name], sizes)
                if complete:
                    curves[name], data[name] = lengths.curve(segments), sources[name].data(segments)
            return SuiteOutcome(_harness_tree({}, data), data, skipped, curves=curves)

        return run_suite(subject, LENGTHS, _text_settings(settings), ask)

    return ReadySuite(skipped, bool(sources), run)


def _segments(
    judge: Judge, name: str, spans: list[lengths.Span], sizes: tuple[int, ...]
) -> list[lengths.Segment]:
    """The segments of one set of texts."""

    def compute(places: list[int]) -> Iterator[lengths.Segment]:
        some = [spans[place] for place in places]
        gates, count = judge.scorer.gates, judge.count_tokens
        return lengths.each_segment(judge.model, some, lengths=sizes, gates=gates, on_tokens=count)

    questions = [["length", span.ids.tolist(), list(sizes)] for span in spans]
    return _stored(judge, name, questions, compute, lengths.Segment)


def _held_out_text(subject: EvalSubject, request: EvalRequest) -> ReadySuite:
    if request.text is None:
        why = "name a text with --text: a folder that amor prepare wrote, a .txt or a .jsonl file"
        return ReadySuite({HELD_OUT: why}, False, lambda settings: None)
    text, config = request.text, subject.model.config
    context = request.context or config.context
    windows = perplexity.held_out(text, subject.tokenizer, config.vocab, context)
    count = min(len(windows), request.limit or len(windows))
    last = windows.targets[:, -1:]
    questions = [["window", windows.tokens[i].tolist(), last[i].tolist()] for i in range(count)]

    def ask(judge: Judge, complete: bool) -> SuiteOutcome | None:
        def compute(places: list[int]) -> Iterator[perplexity.Window]:
            some = perplexity.at(windows, places)
            gates, count = judge.scorer.gates, judge.count_tokens
            return perplexity.each_window(
                subject.model, subject.tokenizer, some, gates=gates, on_tokens=count
            )

        results = _stored(judge, HELD_OUT, questions, compute, perplexity.Window)
        if not complete:
            return None
        data = {HELD_OUT: perplexity.data(text, windows)}
        numbers = {HELD_OUT: {"alias": HELD_OUT, **perplexity.metrics(results)}}
        return SuiteOutcome(_harness_tree(numbers, data), data, {})

    run = lambda settings: run_suite(subject, HELD_OUT, _text_settings(settings), ask)  # noqa: E731
    return ReadySuite({}, True, run)


def _stored(
    judge: Judge,
    task: str,
    questions: list[Any],
    compute: Callable[[list[int]], Iterator[T]],
    kind: type[T],
) -> list[T]:
    """Typed results of pieces of text, computed or from the store; those of other ranks are left
    out."""

    def answers(places: list[int]) -> Iterator[tuple[int, Any, Phases]]:
        for place, each in zip(places, compute(places), strict=True):
            yield place, typed.tree(each), {"target": each.gates} if judge.scorer.gates else {}

    known = judge.answer("segment", [(task, question) for question in questions], answers)
    return [typed.convert(kind, each, "the store of answers") for each in known if each is not None]


def _text_settings(settings: EvalSettings) -> EvalSettings:
    """The settings without those that have no meaning for a text that is read from beginning to
    end."""
    return msgspec.structs.replace(settings, path="likelihood", max_length=None, bos=False)


def _harness_tree(results: dict[str, Any], data: dict[str, Data]) -> dict[str, Any]:
    """Our own results in the harness's layout."""
    samples = {task: {"original": each.rows, "effective": each.rows} for task, each in data.items()}
    return {"results": results, "n-samples": samples}
