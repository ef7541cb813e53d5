"""Tasks of lm-evaluation-harness: its own definitions, with local rows instead of fetched ones."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amor.data import hub
from amor.errors import AmorError, install_hint

Row = dict[str, Any]
SPLITS = ("training_split", "validation_split", "test_split")
FEWSHOT_SEED = 1234  # the harness's own


def need(*packages: str) -> None:
    """An error that names the first package that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            hint = install_hint("eval")
            raise AmorError(f"the package {package} is needed for these tasks: {hint}")


def definition(file: str) -> Row:
    """A task of the harness as its yaml has it, the functions it names included."""
    need("lm_eval")
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(Path(lm_eval.tasks.__file__).parent / file)


def configured(config: Row, rows: list[Row], split: str, source: str) -> Any:
    """A task from its definition and rows, without splits that zero-shot tasks do not read."""
    from lm_eval.api.task import ConfigurableTask

    table = hub.table(rows)
    if config.get("process_docs"):  # once: the harness would do it at every access
        table = hub.changed(table, config["process_docs"])
    splits = {key: config.get(key) if config.get(key) == split else None for key in SPLITS}
    unused = dict.fromkeys(("process_docs", "dataset_name", "dataset_kwargs"))
    config = config | splits | unused | {"dataset_path": source}
    return _with_data(ConfigurableTask, {split: table}, config=config)


def completion(kind: type, name: str, rows: list[Row], split: str, source: str) -> Any:
    """A task that the harness has as a class (swde, fda, squad_completion); its own mean has no
    standard error."""
    from lm_eval.api.metrics import mean

    class Completion(kind):
        def aggregation(self) -> dict[str, Callable[..., float]]:
            return dict.fromkeys(super().aggregation(), mean)

    task = _with_data(Completion, {split: hub.table(rows)})
    task.config.task, task.config.dataset_path = name, source
    return task


def _with_data(kind: type, tables: dict[str, Any], **arguments: Any) -> Any:
    """A task of the harness on these tables, by split."""

    class Local(kind):
        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = tables

    return Local(**arguments)


def class_of(path: str) -> type:
    """The class of a task that the harness has no yaml for: module.Class below lm_eval.tasks."""
    need("lm_eval")
    module, _, name = path.rpartition(".")
    kind: type = getattr(importlib.import_module(f"lm_eval.tasks.{module}"), name)
    return kind


def mean_metric(name: str) -> Row:
    """A metric of a definition: the mean over documents."""
    return {"metric": name, "aggregation": "mean", "higher_is_better": True}


def generated(
    name: str,
    metrics: list[str],
    text: str,
    target: str,
    score: Callable[..., Any],
    generation: Row,
    **more: Any,
) -> Row:
    """A definition of ours: greedy text after the field `text`, scored by a function."""
    return {
        "task": name,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": text,
        "doc_to_target": target,
        "process_results": score,
        "metric_list": [mean_metric(metric) for metric in metrics],
        "generation_kwargs": {"do_sample": False, "temperature": 0.0, **generation},
        "metadata": {"version": 1.0},
        **more,
    }


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
    options = {"limit": limit, "bootstrap_iters": resampled}
    tree = {"tasks": tasks, "groups": {}}
    results = evaluate(lm=lm, task_dict=tree, log_samples=samples, **options)
    config = {"model": "amor", "fewshot_seed": FEWSHOT_SEED, **options}
    return {**results, "config": config, "lm_eval_version": lm_eval.__version__}
