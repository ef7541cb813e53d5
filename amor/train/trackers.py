"""Experiment trackers as observers: TensorBoard, Weights & Biases, trackio; each package is
imported here alone.

They get the numbers of metrics.jsonl under flat names: loss, lr, block0/fire, valid/nll,
timing/tokens_per_second.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amor import typed
from amor.errors import AmorError, install_hint, nearest
from amor.records.run import Line
from amor.train.watch import Observer, RunEnded, RunStarted

PROJECT = "amor"
# name -> the module that is imported
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def scalars(metrics: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """{"blocks": [{"fire": 0.4}]} -> {"block0/fire": 0.4}; numbers only, without those that are not
    finite.
    """
    out: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            out |= scalars(value, f"{above}{key}/")
        elif isinstance(value, list | tuple):
            items = {f"{key.removesuffix('s')}{index}": item for index, item in enumerate(value)}
            out |= scalars(items, above)
        elif isinstance(value, int | float) and not (above == "" and key == "step"):
            out[f"{above}{key}"] = float(value)
    return out


class Tracker(Observer):
    """Passes every line of metrics to wandb or trackio: functions init, log and finish of a module.

    The package is imported at once, before a run begins.
    """

    def __init__(self, name: str):
        self.name, self.opened = name, False
        try:
            self.module: Any = importlib.import_module(MODULES[name])
        except ImportError as error:
            raise AmorError(
                f"--track {name} needs the package {name} ({error}): pip install {name}, or "
                f"{install_hint('track')}"
            ) from error

    def on_start(self, started: RunStarted) -> None:
        self.open(started)
        self.opened = True

    def on_step(self, metrics: Line) -> None:
        self.log(scalars(typed.tree(metrics)), metrics.step)

    on_eval = on_step

    def on_end(self, ended: RunEnded) -> None:
        self.close()

    def close(self) -> None:
        """Finish, also after an error; a second call does nothing."""
        if self.opened:
            self.opened = False
            self.finish()

    def open(self, started: RunStarted) -> None:
        """Begin a run of the tracker; wandb's files go to RUN/wandb, trackio has its own folder."""
        folder = {"dir": started.folder} if self.name == "wandb" else {}
        name, config = Path(started.folder).name, started.recipe.to_dict()
        self.module.init(project=PROJECT, name=name, config=config, **folder)

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the numbers of a step."""
        self.module.log(values, step=step)

    def finish(self) -> None:
        """End the run of the tracker."""
        self.module.finish()


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard."""

    def open(self, started: RunStarted) -> None:
        # steps after the one that a run resumes from are repeated; purge_step removes the old ones
        folder = str(Path(started.folder) / "tensorboard")
        self.writer = self.module.SummaryWriter(folder, purge_step=started.step + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def trackers(names: str) -> list[Tracker]:
    """'tensorboard, wandb' -> two observers; '' -> none."""
    wanted = [name for part in names.split(",") if (name := part.strip())]
    for name in wanted:
        if name not in MODULES:
            raise AmorError(f"no tracker {name!r}; {nearest(name, MODULES)}")
    return [(TensorBoard if name == "tensorboard" else Tracker)(name) for name in wanted]
