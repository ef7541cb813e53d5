"""`amor eval`: every suite by what runs it, lm-evaluation-harness or the one loop over text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from amor import typed
from amor.errors import AmorError, nearest
from amor.eval import harness, lengths, niah, perplexity, tasks, texts
from amor.eval.judge import Judge
from amor.eval.lengths import SEGMENTS
from amor.eval.run import PreparedSuite, Scores, SuiteOutcome, read_scores, run_suite
from amor.eval.subject import EvalSubject
from amor.eval.tasks import HELD_OUT, LENGTHS
from amor.records.evals import Data, EvalSettings, Gates, LengthCurve, Phases
from amor.records.evals import Path as EvalPath
from amor.vocabulary import prefix_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RESAMPLED = 1000  # bootstrap iterations for the standard errors of scores that are not means
T = TypeVar("T", lengths.Segment, perplexity.Window)


@dataclass(frozen=True)
class EvalRequest:
    """The options of `amor eval`."""

    data: Path | None  # folder of local files; None: the hub
    text: Path | None = None  # of `perplexity`
    tasks: list[str] | None = None  # None: all
    lengths: list[int] | None = None  # in tokens; None: the paper's
    samples: int = 500  # needle prompts per length, as in the paper
    segments: int = SEGMENTS  # texts per set of length-extrapolation
    context: int = 0  # tokens per window of `perplexity`; 0: the training context
    seed: int = 0  # of needle prompts
    path: EvalPath = "likelihood"  # or "decode": token by token with the decode engine
    max_length: int | None = None  # tokens of a request; None: not limited
    # prefix_ids(tokenizer, add_bos) stand before each context and document; None: what the
    # tokenizer's post-processor adds
    add_bos: bool | None = None
    limit: int | None = None  # documents per task; None: all

    def settings(self, suite: str, gates: Gates, tokenizer: Tokenizer) -> EvalSettings:
        """What scores depend on; the loop over text has neither path nor max_length."""
        bos = bool(prefix_ids(tokenizer, self.add_bos))
        settings = EvalSettings(gates=gates, limit=self.limit, bos=bos)
        if not tasks.SUITES[suite].harness:
            return settings
        import lm_eval

        own = {"path": self.path, "max_length": self.max_length, "harness": lm_eval.__version__}
        return msgspec.structs.replace(settings, **own)


def evaluate(
    subject: EvalSubject, names: Sequence[str], ways: Sequence[Gates], request: EvalRequest
) -> dict[str, Any]:
    """Evaluate every suite with the gates in every way; the files written, the tasks skipped, the
    scores by suite and gates."""
    known = [task for name in names for task in tasks.in_suite(name)]
    for task in request.tasks or ():
        if task not in known:
            near = nearest(task[:80], known)
            raise AmorError(f"--task: no {task[:80]!r} in {', '.join(names)}; {near}")
    written: dict[str, list[str]] = {}
    skipped: dict[str, dict[str, str]] = {}
    scores: dict[str, dict[str, Scores]] = {}
    for name in names:
        suite = prepare(subject, name, request)
        skipped |= {name: suite.skipped} if suite.skipped else {}
        for task, why in suite.skipped.items():
            log(subject, f"{name}: {task} is skipped: {why}")
        if suite.evaluate is None:
            log(subject, f"{name}: skipped, nothing of it can be run")
            continue
        for gates in ways:
            began = time.perf_counter()
            path = run_suite(subject, suite, request.settings(name, gates, subject.tokenizer))
            if path is not None:
                written.setdefault(name, []).append(str(path))
                scores.setdefault(name, {})[gates] = read_scores(path)
                log(subject, f"{path} written, {time.perf_counter() - began:.0f} s")
    if not written and not subject.ranks.rank:
        reasons = "; ".join(f"{n}: {w}" for each in skipped.values() for n, w in each.items())
        raise AmorError(f"nothing was evaluated: {reasons}")
    folder = str(subject.out)
    return {"folder": folder, "written": written, "skipped": skipped, "scores": scores}


def log(subject: EvalSubject, words: str) -> None:
    """Print a line on rank 0."""
    if not subject.ranks.rank:
        print(words, flush=True)


def prepare(subject: EvalSubject, name: str, request: EvalRequest) -> PreparedSuite:
    """The suite with its texts."""
    if name == LENGTHS:
        return _length_extrapolation(subject, request)
    if name == HELD_OUT:
        return _held_out_text(subject, request)
    known = tasks.in_suite(name)
    loaded = tasks.load(
        name,
        request.data,
        tokenizer=subject.tokenizer,
        lengths=request.lengths or niah.LENGTHS,
        seed=request.seed,
        samples=request.samples,
        names=None if request.tasks is None else [task for task in request.tasks if task in known],
    )

    def evaluate(judge: Judge, complete: bool) -> SuiteOutcome:
        from amor.eval.lm import AmorLM

        lm, resampled = AmorLM(judge), RESAMPLED if complete else 0
        tree = harness.evaluated(lm, loaded.tasks, request.limit, resampled, samples=complete)
        samples = tree.pop("samples", {})
        return SuiteOutcome(tree, loaded.data, samples, lengths=loaded.lengths)

    return PreparedSuite(name, loaded.skipped, evaluate if loaded.tasks else None)


def _length_extrapolation(subject: EvalSubject, request: EvalRequest) -> PreparedSuite:
    wanted = [n for n in tasks.in_suite(LENGTHS) if request.tasks is None or n in request.tasks]
    sources, skipped = texts.find(request.data, wanted)
    sizes = tuple(request.lengths or lengths.LENGTHS)
    count = min(request.segments, request.limit or request.segments)
    spans: dict[str, list[lengths.Span]] = {}

    def evaluate(judge: Judge, complete: bool) -> SuiteOutcome:
        curves: dict[str, LengthCurve] = {}
        data: dict[str, Data] = {}
        for name, source in sources.items():
            if name not in spans:  # once for all ways of running gates
                spans[name] = lengths.spans(
                    subject.tokenizer, source, sizes, count, name, request.add_bos
                )
            segments = _segments(judge, name, spans[name], sizes)
            if complete:
                curves[name], data[name] = lengths.curve(segments), source.data(segments)
        return SuiteOutcome(_harness_tree({}, data), data, curves=curves)

    return PreparedSuite(LENGTHS, skipped, evaluate if sources else None)


def _segments(
    judge: Judge, name: str, spans: list[lengths.Span], sizes: tuple[int, ...]
) -> list[lengths.Segment]:
    """The segments of one set of texts."""

    def compute(wanted: list[int]) -> Iterator[lengths.Segment]:
        some = [spans[index] for index in wanted]
        gates, count = judge.scorer.gates, judge.count_tokens
        return lengths.each_segment(judge.model, some, lengths=sizes, gates=gates, on_tokens=count)

    questions = [["length", span.ids.tolist(), list(sizes)] for span in spans]
    return _stored(judge, name, questions, compute, lengths.Segment)


def _held_out_text(subject: EvalSubject, request: EvalRequest) -> PreparedSuite:
    if request.text is None:
        why = "name a text with --text: a folder that amor prepare wrote, a .txt or a .jsonl file"
        return PreparedSuite(HELD_OUT, {HELD_OUT: why}, None)
    text, config = request.text, subject.model.config
    context = request.context or config.context
    windows = perplexity.held_out(
        text, subject.tokenizer, config.vocab, context, add_bos=request.add_bos
    )
    count = min(len(windows), request.limit or len(windows))
    last = windows.targets[:, -1:]
    questions = [["window", windows.tokens[i].tolist(), last[i].tolist()] for i in range(count)]

    def evaluate(judge: Judge, complete: bool) -> SuiteOutcome:
        def compute(wanted: list[int]) -> Iterator[perplexity.Window]:
            some, gates = windows[wanted], judge.scorer.gates
            return perplexity.each_window(
                subject.model, subject.tokenizer, some, gates=gates, on_tokens=judge.count_tokens
            )

        results = _stored(judge, HELD_OUT, questions, compute, perplexity.Window)
        data = {HELD_OUT: perplexity.data(text, windows)}
        metrics = perplexity.metrics(results) if complete else {}
        numbers = {HELD_OUT: {"alias": HELD_OUT, **metrics}}
        return SuiteOutcome(_harness_tree(numbers, data), data)

    return PreparedSuite(HELD_OUT, {}, evaluate)


def _stored(
    judge: Judge,
    task: str,
    questions: list[Any],
    compute: Callable[[list[int]], Iterator[T]],
    kind: type[T],
) -> list[T]:
    """Typed results of pieces of text, computed or stored, without those of other ranks."""

    def answers(wanted: list[int]) -> Iterator[tuple[int, Any, Phases]]:
        for index, each in zip(wanted, compute(wanted), strict=True):
            yield index, typed.tree(each), {"target": each.gates} if judge.scorer.gates else {}

    known = judge.answer("segment", [(task, question) for question in questions], answers)
    return [typed.convert(kind, each, "the store of answers") for each in known if each is not None]


def _harness_tree(results: dict[str, Any], data: dict[str, Data]) -> dict[str, Any]:
    """Our own results in the harness's layout."""
    samples = {task: {"original": each.rows, "effective": each.rows} for task, each in data.items()}
    return {"results": results, "n-samples": samples}
