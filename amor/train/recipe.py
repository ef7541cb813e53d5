"""What is run, as frozen data: a TOML file, what it extends, and what the command line changes.

An unknown key, a wrong type or an impossible number is refused here, before anything is built.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from amor import typed
from amor.checks import MOST_LAYERS, Context, Seed
from amor.config import Config, flat
from amor.data.tasks.base import read_task
from amor.errors import AmorError, nearest
from amor.models.folder import load_config
from amor.presets import preset

HOME = Path(__file__).parents[1] / "recipes"
MOST_DOTS = 16  # of a key
CHOICES = {
    "documents": ("joined", "apart"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("float32", "bf16", "bf16-cpu"),
    "distributed": ("none", "ddp", "fsdp"),
    "freeze": ("none", "backbone"),
}

Word = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00-\x1f]*$")]  # in one line
Sequences = Annotated[int, Meta(ge=1, le=2**20)]
Steps = Annotated[int, Meta(ge=0, le=2**40)]
Every = Annotated[int, Meta(ge=1, le=2**40)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
Size = Annotated[float, Meta(ge=0, le=1e9)]
Depth = Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
Rate = Annotated[float, Meta(ge=0, le=1e3)]
AboveZero = Annotated[float, Meta(gt=0, le=1e9)]


@dataclass(frozen=True)
class ModelChoice:
    """A preset by name and scale, and keys of it to change, e.g. {"blocks.count": 1}; or a model that is there already."""

    name: Word = "amor-mamba2"
    scale: Word = "tiny"
    depth: Depth = 0  # layers; 0: as many as the scale has
    changes: Mapping[str, Any] = field(default_factory=dict)
    start: Word = ""  # a model folder whose config and weights the run begins with, instead of a preset's

    def __post_init__(self) -> None:
        try:
            json.dumps(self.changes, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise AmorError("changes: only finite numbers, texts, true, false, lists and tables of them") from None
        if self.start and (self.changes or self.depth):
            raise AmorError(
                f"start {self.start!r} is a whole model, so there is nothing to change of it; leave changes and depth away"
            )


@dataclass(frozen=True)
class Optimiser:
    """AdamW with decay on matrices only, and the clip on the norm of the whole gradient."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Size = 1e-8
    weight_decay: Size = 0.1
    clip: AboveZero = 1.0
    spike: Size = 10.0  # a gradient norm above this many times the median of the last ones is said; 0: never
    skip_spikes: bool = False  # and such a step changes nothing


@dataclass(frozen=True)
class Rates:
    """Learning rates: warm-up to the peak, then a cosine to the floor. alpha has a peak of its own and the same shape."""

    peak: AboveZero = 3e-4
    floor: Rate = 1e-5
    warmup: Steps = 2000
    alpha: Rate = 3e-3

    def __post_init__(self) -> None:
        if self.floor > self.peak:
            raise AmorError(f"lr: floor {self.floor} lies above peak {self.peak}")


@dataclass(frozen=True)
class EvalSchedule:
    """How often to judge the model on the validation split, and on how many windows of it; 0: never."""

    every: Steps = 250
    windows: Every = 64


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a checkpoint is written and which ones stay."""

    every: Every = 250
    latest: Every = 2  # the newest ones
    best: bool = True  # the one with the lowest validation nll
    milestones: Steps = 0  # every one at a multiple of this many steps; 0: none


@dataclass(frozen=True)
class Recipe:
    """A training run, without the machine it runs on."""

    name: Annotated[Word, Meta(min_length=1)] = "run"
    model: ModelChoice = ModelChoice()
    data: Word = ""  # a folder of `amor prepare`: train/ and, for evaluation, valid/
    task: Mapping[str, Any] = field(default_factory=dict)  # instead of data: a generated task's kind and options
    documents: str = "joined"  # "apart": a document sees nothing of the one before it in its window
    context: Context = 256
    batch: Sequences = 16  # sequences an optimiser step, over all micro-batches and ranks
    micro_batch: Sequences = 16  # sequences at a time on one rank
    steps: Steps = 0  # give steps, or tokens: steps = tokens // (batch * context)
    tokens: typed.Count = 0
    optimiser: Optimiser = Optimiser()
    lr: Rates = Rates()
    seed: Seed = 42
    precision: str = "float32"
    device: Word = "auto"
    recompute: bool = False  # compute a layer's activations again in the backward pass instead of keeping them
    compile: bool = False
    eval: EvalSchedule = EvalSchedule()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    freeze: str = "none"  # "backbone": only the gated blocks are trained, all else stays as it is to the bit
    open_steps: Steps = 0  # the first ones, in which blocks fire everywhere: gates score and learn, and decide from then on
    distributed: str = "none"
    track: Word = ""  # also tell "tensorboard", "wandb" or "trackio", or several of them
    verify: bool = True  # read every shard and compare it with its hash before the first step

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise AmorError(f"{name}: no {getattr(self, name)!r}; {nearest(getattr(self, name), choices)}")
        if self.task:
            self._as_the_task_is()
        if (self.steps > 0) == (self.tokens > 0):
            raise AmorError(f"give steps or tokens, one of the two, above 0; here steps = {self.steps}, tokens = {self.tokens}")
        if not self.total_steps:
            raise AmorError(f"tokens is {self.tokens:,}, less than one step of {self.step_tokens:,}")

    def _as_the_task_is(self) -> None:
        """A task says how long its rows are and how many tokens there are; every option of it is written out."""
        if self.data:
            raise AmorError(f"data {self.data!r} and a task are given; a run learns from one of the two")
        if self.model.start:
            raise AmorError(f"a task is learned from the beginning; model.start {self.model.start!r} knows another vocabulary")
        task = read_task(self.task)
        if self.context not in (type(self).context, task.length):
            raise AmorError(f"context {self.context}: rows of task {task.kind} are {task.length} tokens long; leave context away")
        vocab = flat(self.model.changes).get("vocab", task.vocab)
        if isinstance(vocab, int) and vocab < task.vocab:
            raise AmorError(
                f"model.changes.vocab {vocab}: task {task.kind} has {task.vocab} tokens; leave it away, or give as many"
            )
        model = dataclasses.replace(self.model, changes={**self.model.changes, "vocab": vocab})
        for key, value in {"task": task.tree, "context": task.length, "model": model}.items():
            object.__setattr__(self, key, value)

    @property
    def step_tokens(self) -> int:
        return self.batch * self.context

    @property
    def total_steps(self) -> int:
        return self.steps or self.tokens // self.step_tokens

    def config(self) -> Config:
        if self.model.start:
            return load_config(self.model.start).change(context=self.context)
        # not by keywords of preset, which has a name and a scale of its own
        base = preset(self.model.name, self.model.scale, self.model.depth or None)
        return base.change(**{"context": self.context, **flat(self.model.changes)})

    def to_dict(self) -> dict[str, Any]:
        tree = dataclasses.asdict(self)
        tree["optimiser"]["betas"] = list(self.optimiser.betas)
        return tree

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """A recipe of plain values, whoever wrote them; where: what to call them in an error."""
        return typed.convert(cls, tree, where)


def load(given: str | Path, changes: Iterable[str] = (), **keys: Any) -> Recipe:
    """A recipe file with `key=value` changes, the later ones winning; keys by keyword come last."""
    path = find(given)
    tree = {"name": path.stem, **typed.extended(path)}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise AmorError(f"--set {change}: write key=value, e.g. --set lr.peak=1e-3")
        if key.count(".") > MOST_DOTS:
            raise AmorError(f"--set {change[:80]}...: no key of {key.count('.')} dots")
        _put(tree, key.strip(), typed.toml_value(value.strip()))
    for key, value in keys.items():
        tree[key] = value
    if keys.get("steps"):
        tree["tokens"] = 0
    return Recipe.from_dict(tree, str(path))


def find(given: str | Path) -> Path:
    """A recipe by path, or by its name in amor/recipes/ ('tiny/amor-mamba2')."""
    for path in (Path(given), Path(f"{given}.toml"), HOME / given, HOME / f"{given}.toml"):
        try:
            if path.is_file():
                return path
        except OSError:  # a name that no file can have
            continue
    raise AmorError(f"no recipe {str(given)!r}; {nearest(str(given), names())}")


def names() -> list[str]:
    """Every recipe of the package; studies lie beside them."""
    return sorted(str(p.relative_to(HOME).with_suffix("")) for p in HOME.glob("*/*.toml") if p.parent.name != "studies")


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; what a model changes is itself written with dots, so that part is one key."""
    head, _, rest = key.partition(".")
    if not rest:
        tree[key] = value
        return
    if not isinstance(tree.get(head, {}), Mapping):
        raise AmorError(f"--set {key}: {head!r} is {tree[head]!r} and has nothing inside")
    if head == "changes":
        tree[head] = flat(tree.get(head, {})) | {rest: value}
        return
    tree[head] = dict(tree.get(head, {}))
    _put(tree[head], rest, value)
