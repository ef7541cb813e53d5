"""Experiment trackers as observers: TensorBoard, Weights & Biases, trackio; each package is
imported here alone.

They get the numbers of metrics.jsonl under flat names: loss, lr, block0/fire, valid/nll,
timing/tokens_per_second.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from amor import typed
from amor.errors import AmorError, nearest
from amor.records.run import Line
from amor.train.watch import Observer, RunEnded, RunStarted

PROJECT = "amor"


def scalars(metrics: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """{"blocks": [{"fire": 0.4}]} -> {"block0/fire": 0.4}; numbers only, without those that are not
    finite.
    """
    out: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            out |= scalars(value, f"{above}{key}/")
        elif isinstance(value, list | tuple):
            out |= scalars(
                {f"{key.removesuffix('s')}{index}": item for index, item in enumerate(value)}, above
            )
        elif isinstance(value, int | float) and not (above == "" and key == "step"):
            out[f"{above}{key}"] = float(value)
    return out


class Tracker(Observer):
    """Passes every line of metrics to a tracker. The package is imported at once, before a run
    begins.
    """

    def __init__(self, name: str, module: str, package: str):
        self.name, self.opened = name, False
        self.door: ModuleType = _door(name, module, package)

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
        """Begin a run of the tracker."""
        raise NotImplementedError

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the numbers of a step."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the run of the tracker."""
        raise NotImplementedError


def _door(name: str, module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise AmorError(
            f"--track {name} needs the package {package} ({error}); "
            f"pip install 'amor[track]' or {package}"
        ) from error


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard."""

    def __init__(self) -> None:
        super().__init__("tensorboard", "torch.utils.tensorboard", "tensorboard")

    def open(self, started: RunStarted) -> None:
        # steps after the one a run resumes from are taken again; purge_step removes the old ones
        folder = str(Path(started.folder) / "tensorboard")
        self.writer = self.door.SummaryWriter(folder, purge_step=started.step + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


class Modular(Tracker):
    """A tracker that is used through three functions of its module: init, log, finish."""

    def open(self, started: RunStarted) -> None:
        self.door.init(
            project=PROJECT,
            name=Path(started.folder).name,
            config=started.recipe.to_dict(),
            **self.more(started),
        )

    def more(self, started: RunStarted) -> dict[str, str]:
        """Further arguments of init."""
        return {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.door.log(values, step=step)

    def finish(self) -> None:
        self.door.finish()


class Wandb(Modular):
    """Weights & Biases, its files in RUN/wandb."""

    def __init__(self) -> None:
        super().__init__("wandb", "wandb", "wandb")

    def more(self, started: RunStarted) -> dict[str, str]:
        return {"dir": started.folder}


class Trackio(Modular):
    """trackio, which keeps its own folder."""

    def __init__(self) -> None:
        super().__init__("trackio", "trackio", "trackio")


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def trackers(names: str) -> list[Tracker]:
    """'tensorboard, wandb' -> two observers; '' -> none."""
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in TRACKERS:
            raise AmorError(f"no tracker {name!r}; {nearest(name, TRACKERS)}")
        found.append(TRACKERS[name]())
    return found
