"""Tasks of lm-evaluation-harness: its own definitions, with rows given instead of fetched."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amor.data import hub
from amor.data.encoder import Encoder
from amor.errors import AmorError
from amor.eval.rows import HubSource

Row = dict[str, Any]
INSTALL = "pip install 'amor[eval]'"
SPLITS = ("training_split", "validation_split", "test_split")
FEWSHOT_SEED = 1234  # the harness's own


def need(*packages: str) -> None:
    """An error that names the first package that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise AmorError(f"the package {package} is needed for these tasks: {INSTALL}")


def definition(file: str) -> dict[str, Any]:
    """A task of the harness as its yaml has it, the functions it names included."""
    need("lm_eval")
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(Path(lm_eval.tasks.__file__).parent / file)


def hub_of(config: dict[str, Any]) -> HubSource:
    """Where the rows of a definition come from."""
    return HubSource(
        config["dataset_path"],
        config.get("dataset_name"),
        config.get("test_split") or config["validation_split"],
    )


def configured(config: dict[str, Any], rows: list[Row], split: str, source: str) -> Any:
    """A task from its definition and its rows. Splits that zero-shot tasks do not read are left
    out."""
    from lm_eval.api.task import ConfigurableTask

    table = hub.table(rows)
    if config.get(
        "process_docs"
    ):  # once: the harness would do it anew wherever it looks at its documents
        table = hub.changed(table, config["process_docs"])
    changes = {key: config.get(key) if config.get(key) == split else None for key in SPLITS}
    changes |= {
        "process_docs": None,
        "dataset_path": source,
        "dataset_name": None,
        "dataset_kwargs": None,
    }
    return given(ConfigurableTask, {split: table}, config=config | changes)


def completion(kind: type, name: str, rows: list[Row], split: str, source: str) -> Any:
    """A task that the harness has as a class (swde, fda, squad_completion); its own mean has no
    standard error."""
    from lm_eval.api.metrics import mean

    class Completed(kind):
        def aggregation(self) -> dict[str, Callable[..., float]]:
            return dict.fromkeys(super().aggregation(), mean)

    task = given(Completed, {split: hub.table(rows)})
    task.config.task, task.config.dataset_path = name, source
    return task


def given(kind: type, tables: dict[str, Any], **arguments: Any) -> Any:
    """A task of the harness whose data set is given."""

    class Given(kind):
        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = tables

    return Given(**arguments)


def class_of(path: str) -> type:
    """The class of a task that the harness has no yaml for: module.Class below lm_eval.tasks."""
    need("lm_eval")
    module, _, name = path.rpartition(".")
    kind: type = getattr(importlib.import_module(f"lm_eval.tasks.{module}"), name)
    return kind


def with_first_line(config: dict[str, Any]) -> dict[str, Any]:
    """LongBench's definition with one more score: of the first line that was written, for a base
    model never stops."""
    score = config["process_results"]

    def process_results(doc: Row, results: list[str]) -> dict[str, float]:
        first = results[0].strip("\n").split("\n")[0]
        return score(doc, results) | {"score_first_line": score(doc, [first])["score"]}

    more = {"metric": "score_first_line", "aggregation": "mean", "higher_is_better": True}
    return config | {
        "process_results": process_results,
        "metric_list": [*config["metric_list"], more],
    }


def generated(
    name: str,
    metrics: list[str],
    text: str,
    target: str,
    score: Callable[..., Any],
    generation: Row,
    **more: Any,
) -> Row:
    """A definition of ours: text is written greedily behind a field of the document, and scored by
    a function."""
    return {
        "task": name,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": text,
        "doc_to_target": target,
        "process_results": score,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in metrics
        ],
        "generation_kwargs": {"do_sample": False, "temperature": 0.0, **generation},
        "metadata": {"version": 1.0},
        **more,
    }


def needles_lack() -> str | None:
    """What is missing for the harness's own needles, and the command that supplies it; None where
    all is there."""
    for package in ("nltk", "wonderwords", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is missing: pip install {package}"
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return "nltk's punkt_tab is missing: python -m nltk.downloader punkt_tab"
    return None


def needles(
    name: str,
    number: int,
    encoder: Encoder,
    lengths: tuple[int, ...],
    samples: int,
    seed: int,
    essays: str,
) -> list[Row]:
    """The documents of the harness's niah_single_NUMBER, lengths in turn. It draws from the global
    `random`, left as it was."""
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    before = random.getstate()
    random.seed(f"{seed} niah_single_{number}")
    try:
        by_length = [
            prepare_niah.generate_samples(
                essays.split(" ") if number > 1 else prepare_niah.get_haystack("repeat"),
                TOKENIZER=lambda text: SimpleNamespace(input_ids=encoder(text)),
                max_seq_length=length,
                template=niah_utils.TEMPLATE,
                type_haystack="essay" if number > 1 else "repeat",
                type_needle_k="words",
                type_needle_v="uuids" if number == 3 else "numbers",
                num_samples=samples,
            )
            for length in lengths
        ]
    except ValueError as error:  # a length that holds no sample
        raise AmorError(f"{name}: {' '.join(str(error).split())}") from error
    finally:
        random.setstate(before)
    kept = ("input", "gen_prefix", "outputs", "max_length")
    rows = [held[at] for at in range(samples) for held in by_length if at < len(held)]
    return [
        {key: row[key] for key in kept}
        | {"tokens": len(encoder(f"{row['input']} {row['gen_prefix']}"))}
        for row in rows
    ]


def evaluated(
    lm: Any, tasks: dict[str, Any], limit: int | None, resampled: int, samples: bool
) -> dict[str, Any]:
    """Tasks through the harness as by its simple_evaluate, without the time in which that reads
    every task there is."""
    import lm_eval
    from lm_eval.evaluator import evaluate

    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    given = {"limit": limit, "bootstrap_iters": resampled}
    results = evaluate(
        lm=lm, task_dict={"tasks": tasks, "groups": {}}, log_samples=samples, **given
    )
    config = {"model": "amor", "fewshot_seed": FEWSHOT_SEED, **given}
    return {**results, "config": config, "lm_eval_version": lm_eval.__version__}
