"""Which numbers of a suite are shown, in the order of the paper's tables, and where the paper prints the same."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from amor.errors import AmorError, nearest

LENGTHS = "length-extrapolation"  # the suite of curves: it has no columns


@dataclass(frozen=True)
class ScoreColumn:
    """One number of a model: a metric of a task."""

    title: str
    task: str
    metric: str
    paper: str = ""  # the column of the paper's table; two of ours may stand beside one of theirs
    percent: bool = True  # an accuracy, shown times 100
    lower: bool = False  # whether less is better
    digits: int = 1
    # how the number follows from those of documents; "exp": they are log-likelihoods, it is exp(-mean); None: they are not told
    over: Literal["mean", "exp", None] = "mean"

    @property
    def shown(self) -> float:
        """What a score is multiplied by where it is shown."""
        return 100.0 if self.percent else 1.0


@dataclass(frozen=True)
class Suite:
    columns: tuple[ScoreColumn, ...]
    table: str = ""  # the paper's
    ablations: tuple[str, ...] = ()
    scale: str = "1.5B"  # of the paper's rows that are shown unless another is asked for
    average: bool = False  # whether the paper prints the mean of all accuracies
    figure: str = "accuracy"  # drawn of it unless another is asked for; "": none
    remark: str = ""  # what a reader must know to set our numbers beside the paper's


def _common_sense() -> Suite:
    titles = {
        "lambada_openai": "LAMB",
        "hellaswag": "HSwag",
        "piqa": "PIQA",
        "arc_easy": "ARC-E",
        "arc_challenge": "ARC-C",
        "winogrande": "WinoG",
        "openbookqa": "OBQA",
        "truthfulqa_mc2": "TQA",
    }
    key = "lambada_openai/perplexity"
    perplexity = ScoreColumn("LAMB ppl", "lambada_openai", "perplexity", key, percent=False, lower=True, over="exp")
    accuracies = tuple(ScoreColumn(title, task, "acc", f"{task}/acc") for task, title in titles.items())
    ablations = ("ablation_440m", "ablation_common_sense_1p5b", "depth_k")
    return Suite((perplexity, *accuracies), "common_sense", ablations, "180M", average=True)


def _retrieval() -> Suite:
    stock = {"swde": ("SWDE", "swde"), "squad_completion": ("SQuAD", "squad"), "fda": ("FDA", "fda")}
    cloze = {"swde": "SWDE", "squad": "SQuAD", "fda": "FDA", "triviaqa": "TQA", "nq": "NQ", "drop": "DROP"}
    columns = [ScoreColumn(title, task, "contains", paper) for task, (title, paper) in stock.items()]
    columns += [ScoreColumn(f"{title} cloze", f"cloze_{name}", "contains", name) for name, title in cloze.items()]
    remark = "it does not say which prompts it used, so its SWDE, SQuAD and FDA stand under whichever of ours are here"
    return Suite(tuple(columns), "retrieval_niah", ("ablation_retrieval_1p5b",), remark=remark)


def _niah() -> Suite:
    columns = [niah_column(f"niah_single_{kind}", length) for kind in (1, 2, 3) for length in (1024, 2048, 4096)]
    remark = "its lengths are upper bounds, which the harness's generator reaches in steps"
    return Suite(tuple(columns), "retrieval_niah", ("ablation_retrieval_1p5b",), figure="niah", remark=remark)


def niah_column(task: str, length: int) -> ScoreColumn:
    """One needle at one length. The harness's own generator is named apart; the paper's numbers stand beside either."""
    kind = task[-1]
    name = f"{length // 1024}K" if length % 1024 == 0 else f"{length}"
    stock = " stock" if task.startswith("niah_stock_") else ""
    return ScoreColumn(f"S{kind} {name}{stock}", task, str(length), f"niah_single_{kind}/{length}")


def _longbench() -> Suite:
    titles = {
        "narrativeqa": "NQA",
        "qasper": "QQA",
        "multifieldqa_en": "MFQ",
        "hotpotqa": "HQA",
        "2wikimqa": "2WM",
        "musique": "Mus",
        "gov_report": "GvR",
        "qmsum": "QMS",
        "multi_news": "MNs",
        "trec": "TRC",
        "triviaqa": "TQA",
        "samsum": "SSM",
        "lcc": "LCC",
        "repobench-p": "RBP",
    }
    columns = tuple(ScoreColumn(title, f"longbench_{name}", "score", name) for name, title in titles.items())
    return Suite(columns, "longbench", average=True)


def _perplexity() -> Suite:
    columns = (
        ScoreColumn("perplexity", "perplexity", "perplexity", "fineweb_edu_ppl", percent=False, lower=True, digits=2, over=None),
        ScoreColumn("bits/byte", "perplexity", "bits_per_byte", percent=False, lower=True, digits=3, over=None),
    )
    remark = "of held-out FineWeb-Edu with the Llama 3.1 tokenizer; perplexities compare on the same text and tokens only"
    return Suite(columns, "common_sense", ("ablation_common_sense_1p5b",), "180M", figure="", remark=remark)


SUITES: dict[str, Callable[[], Suite]] = {
    "common-sense": _common_sense,
    "retrieval": _retrieval,
    "niah": _niah,
    "longbench": _longbench,
    "perplexity": _perplexity,
    LENGTHS: lambda: Suite((), figure="extrapolation"),
}


def suite(name: str) -> Suite:
    if name not in SUITES:
        raise AmorError(f"no suite {name!r}; {nearest(name, SUITES)}")
    return SUITES[name]()


def shown(columns: Iterable[ScoreColumn], measured: Callable[[ScoreColumn], bool]) -> tuple[ScoreColumn, ...]:
    """Those that were measured; of the paper's columns that none of ours stands beside, the first of ours that would."""
    columns = tuple(columns)
    taken = {column.paper for column in columns if measured(column)}
    kept = []
    for column in columns:
        if measured(column) or (column.paper and column.paper not in taken):
            kept.append(column)
            taken.add(column.paper)
    return tuple(kept)
