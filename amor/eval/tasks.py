"""What is asked of a model: the tasks of a suite as objects of lm-evaluation-harness, from local files or the hub.

`load` gives a task whole or names it as skipped, with the reason and the command that supplies what is missing. Rows that cannot
be read are an error that names file and line: a task is never run on a part of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from amor.errors import AmorError, nearest
from amor.eval import harness, rows
from amor.eval.asked import (
    ESSAYS,
    Asked,
    Call,
    Complete,
    Long,
    Needles,
    StandIn,
    Stock,
    StockNeedles,
    Windowed,
)
from amor.records.evals import Data

LONGEST = 1 << 24  # of a prompt that is made
MOST_SAMPLES = 1_000_000


@dataclass
class Loaded:
    """The tasks of a suite, where their rows come from, and what could not be loaded."""

    tasks: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Data] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)  # mean true tokens of prompts, by task or "task,length"


def _from_squad(row: rows.Squad) -> rows.Completion:
    text = f"{row.context.strip()}\n\nQuestion: {row.question.strip()}\nAnswer:"
    return rows.Completion(text=text, value=row.answers.text[0])


_SWDE = StandIn("swde_completion", "pages of SWDE, not the rows of hazyresearch/based-swde-v2", rows.Keyed)
_FDA = StandIn("fda_completion", "FDA summaries, not the rows of hazyresearch/based-fda", rows.Keyed)
_SQUAD = StandIn(
    "squad_v1_dev_subset",
    "questions of SQuAD 1.1, not the completions of hazyresearch/based-squad",
    rows.Squad,
    _from_squad,
)
LONG = (
    *(
        "narrativeqa",
        "qasper",
        "multifieldqa_en",
        "hotpotqa",
        "2wikimqa",
        "musique",
        "gov_report",
        "qmsum",
        "multi_news",
    ),
    *("trec", "triviaqa", "samsum", "lcc", "repobench-p"),
)
SUITES: dict[str, dict[str, Asked | Needles]] = {
    "common-sense": {
        "lambada_openai": Stock("acc", rows.Lambada, "lambada_openai_test", yaml="lambada/lambada_openai.yaml"),
        "hellaswag": Stock("acc", rows.HellaSwag, "hellaswag_validation", yaml="hellaswag/hellaswag.yaml"),
        "piqa": Stock("acc", rows.Piqa, "piqa_validation", yaml="piqa/piqa.yaml"),
        "arc_easy": Stock("acc", rows.Arc, "arc_easy_test", yaml="arc/arc_easy.yaml"),
        "arc_challenge": Stock("acc", rows.Arc, "arc_challenge_test", yaml="arc/arc_challenge.yaml"),
        "winogrande": Stock("acc", rows.WinoGrande, "winogrande_xl_validation", yaml="winogrande/default.yaml"),
        "openbookqa": Stock("acc", rows.OpenBook, "openbookqa_test", yaml="openbookqa/openbookqa.yaml"),
        "truthfulqa_mc2": Stock(
            "acc",
            rows.TruthfulQA,
            "truthfulqa_mc_validation",
            yaml="truthfulqa/truthfulqa_mc2.yaml",
        ),
    },
    "retrieval": {
        "swde": Complete("contains", rows.Completion, "based_swde", _SWDE),
        "fda": Complete("contains", rows.Completion, "based_fda", _FDA),
        "squad_completion": Complete("contains", rows.Completion, "based_squad", _SQUAD),
        "cloze_swde": Windowed("contains", rows.Keyed, "based_swde", _SWDE, "hazyresearch/based-swde-v2", "default"),
        "cloze_fda": Windowed("contains", rows.Keyed, "based_fda", _FDA, "hazyresearch/based-fda", "default"),
        "cloze_squad": Windowed(
            "contains",
            rows.Completion,
            "based_squad",
            _SQUAD,
            "hazyresearch/based-squad",
            "default",
        ),
        "cloze_triviaqa": Windowed("contains", rows.Cloze, "based_triviaqa", None, "hazyresearch/based_triviaqa"),
        "cloze_nq": Windowed("contains", rows.Cloze, "based_nq_2048", None, "hazyresearch/based_nq_2048"),
        "cloze_drop": Windowed("contains", rows.Cloze, "based_drop", None, "hazyresearch/based_drop"),
    },
    "niah": {
        "niah_single_1": Needles(),
        "niah_single_2": Needles(file=ESSAYS),
        "niah_single_3": Needles(file=ESSAYS),
        "niah_stock_1": StockNeedles(),
        "niah_stock_2": StockNeedles(file=ESSAYS),
        "niah_stock_3": StockNeedles(file=ESSAYS),
    },
    "longbench": {
        f"longbench_{name}": Long("score", rows.LongBench, f"longbench_{name}", yaml=f"longbench/{name}.yaml") for name in LONG
    },
}


def load(
    suite: str,
    data: Path | None,
    *,
    tokenizer: Tokenizer,
    lengths: Iterable[int] = (1024, 2048, 4096),
    seed: int = 0,
    samples: int = 500,
    names: Iterable[str] | None = None,
) -> Loaded:
    """The tasks of a suite, or those named, from a folder of files (`data`) or the hub (None)."""
    wanted = _wanted(suite, names)
    harness.need("lm_eval", "datasets")
    if data is not None and not data.is_dir():
        raise AmorError(
            f"--data {data}: {'not a folder' if data.exists() else 'no such folder'}; give one that holds .jsonl files"
        )
    call = Call(data, tokenizer, _lengths(lengths), seed, samples)
    if not 1 <= samples <= MOST_SAMPLES:
        raise AmorError(f"samples {samples}: 1 to {MOST_SAMPLES:,} a length")
    loaded = Loaded()
    for name, asked in wanted.items():
        part = asked.load(name, call)
        if isinstance(part, str):
            loaded.skipped[name] = part
        else:
            loaded.tasks[name], loaded.data[name] = part.task, part.data
            loaded.lengths |= part.lengths
    return loaded


def _wanted(suite: str, names: Iterable[str] | None) -> dict[str, Asked | Needles]:
    if suite not in SUITES:
        raise AmorError(f"no suite {suite!r}; {nearest(suite, SUITES)}")
    held = SUITES[suite]
    if names is None:
        return held
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in held:
            raise AmorError(f"no task {name!r} in the suite {suite}; {nearest(name, held)}")
    return {name: held[name] for name in names}


def _lengths(lengths: Iterable[int]) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(lengths))
    if not found or not all(1 <= length <= LONGEST for length in found):
        raise AmorError(f"lengths {', '.join(map(str, found)) or 'none'}: at least one, each 1 to {LONGEST:,} tokens")
    return found
