"""One suite of one model: requests are answered by all ranks, results written by rank 0.

    FOLDER/requests.jsonl     every answer, as it is computed (store.py)
    FOLDER/<suite>.json       results in the harness's layout; under `amor` where they come from
    FOLDER/samples_<suite>_<task>.jsonl   every document with its answers, in the harness's form

Names end with .closed or .open before .json where all gates were closed or open, and .decode where
the decode path was taken. Each rank computes the requests whose keys are its own into its own
store; then rank 0 reads all stores and writes the results. The bits of an answer depend on its
request alone, so they are the same for any number of ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from amor import typed
from amor.data.tokenizer import tokenizer_hash
from amor.eval.judge import Judge
from amor.eval.store import ADVICE
from amor.eval.subject import EvalSubject, Ranks
from amor.files import disk_errors, replace_file
from amor.records.evals import About, Data, EvalSettings, LengthCurve, Timing

# task -> metric -> number, with its standard error as "<metric>_stderr"
Scores = dict[str, dict[str, float]]


@dataclass(frozen=True)
class SuiteOutcome:
    """The results of a suite, and what is stated about them."""

    tree: dict[str, Any]  # results in the harness's layout
    data: dict[str, Data]  # by task
    samples: dict[str, list[Any]] = field(default_factory=dict)  # documents by task
    curves: dict[str, LengthCurve] = field(default_factory=dict)  # of length-extrapolation, by set
    lengths: dict[str, float] = field(default_factory=dict)  # mean tokens of prompts


@dataclass(frozen=True)
class PreparedSuite:
    """A suite whose texts are at hand."""

    name: str
    skipped: dict[str, str]  # tasks, and why
    # (judge, complete) -> outcome; complete False: answers of other ranks are missing. None:
    # nothing of the suite can be run
    evaluate: Callable[[Judge, bool], SuiteOutcome] | None


def run_suite(subject: EvalSubject, suite: PreparedSuite, settings: EvalSettings) -> Path | None:
    """Answer the requests of a suite on all ranks; the path of the results, on rank 0 only."""
    began = time.perf_counter()
    computed = tokens = 0
    if subject.ranks.count > 1:
        part, _ = evaluate_rank(subject, subject.ranks, suite, settings)
        computed, tokens = subject.ranks.total(part.computed, part.tokens)
        if subject.ranks.rank:
            return None
    judge, outcome = evaluate_rank(subject, Ranks(), suite, settings)
    about = About(
        suite=suite.name,
        model=subject.about,
        tokenizer=tokenizer_hash(subject.tokenizer),
        settings=settings,
        data=outcome.data,
        gates=judge.gates,
        timing=Timing(
            seconds=time.perf_counter() - began,
            computed=judge.computed + computed,
            reused=judge.reused - computed,
            tokens=judge.tokens + tokens,
        ),
        curves=outcome.curves,
        lengths=outcome.lengths,
        skipped=suite.skipped,
    )
    return write_results(subject.out, about, outcome)


def evaluate_rank(
    subject: EvalSubject, ranks: Ranks, suite: PreparedSuite, settings: EvalSettings
) -> tuple[Judge, SuiteOutcome]:
    """The outcome of one rank's requests, with the judge that answered them."""
    assert suite.evaluate is not None
    title = f"{suite.name}{suffix(settings)}"
    with closing(subject.store()) as store:
        judge = Judge(
            subject.model,
            subject.tokenizer,
            subject.fingerprint,
            store,
            settings,
            subject.rows,
            ranks,
            title=f"{title}, rank {ranks.rank}" if ranks.count > 1 else title,
        )
        return judge, suite.evaluate(judge, ranks.count == 1)


def write_results(folder: Path, about: About, outcome: SuiteOutcome) -> Path:
    """Write the documents of every task and the results of the suite."""
    suite, end = about.suite, suffix(about.settings)
    for task, rows in outcome.samples.items():
        lines = [json.dumps(row, default=_plain, ensure_ascii=False) for row in rows]
        _replace(folder / f"samples_{suite}_{task}{end}.jsonl", "\n".join(lines) + "\n")
    path = folder / f"{suite}{end}.json"
    # NaN becomes null, and what JSON cannot hold becomes text, as in the harness's own files
    plain = json.loads(json.dumps(outcome.tree, default=_plain), parse_constant=lambda word: None)
    tree = {**plain, "amor": typed.tree(about)}
    _replace(path, json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    with disk_errors(path, ADVICE):
        replace_file(path, text)


def read_scores(path: Path) -> Scores:
    """The scores of a file that `write_results` wrote."""
    tree = json.loads(path.read_text())
    scores = {
        task: {
            key.removesuffix(",none"): value
            for key, value in numbers.items()
            # the harness writes -1 for needle lengths that were not measured
            if key.endswith(",none") and isinstance(value, int | float) and value != -1
        }
        for task, numbers in tree["results"].items()
    }
    for name, curve in tree["amor"]["curves"].items():
        scores[name] = {}
        for length, value, error in zip(curve["lengths"], curve["prefix"], curve["errors"]):
            metric = f"perplexity at {length}"
            scores[name] |= {metric: value, f"{metric}_stderr": error}
    return scores


def suffix(settings: EvalSettings) -> str:
    """What names of result files end with before .json."""
    path, gates = settings.path, settings.gates
    return (".decode" if path == "decode" else "") + ("" if gates == "model" else f".{gates}")


def _plain(value: Any) -> Any:
    """What the harness's results hold besides JSON: numbers of numpy, functions of its configs."""
    return value.item() if isinstance(value, np.generic) else str(value)
