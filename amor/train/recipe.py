"""A recipe: what is trained and how, as frozen data from a TOML file and the command line.

An unknown key, a wrong type or an impossible number is refused here, before anything is built.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from amor import typed
from amor.checks import MOST_LAYERS, Context, Seed
from amor.config import Config
from amor.data.tasks.base import read_task
from amor.errors import AmorError, nearest
from amor.models.folder import load_config
from amor.presets import every_name, preset

HOME = Path(__file__).parents[1] / "recipes"
TINY = "tiny"  # "tiny", and "tiny/<preset>", is the file tiny/base.toml with that model
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
    """[model]: a preset with changes, or a model folder to start from.

    name: a preset, one of `presets.every_name()`. Default: the paper's main model.
    scale: its size, one of `presets.SCALES`. Default: the one that a CPU can train.
    depth: number of layers; 0 (default): as many as the scale has.
    changes: keys of the preset's config to change, e.g. {"blocks.count": 1}. Default: none.
    start: a model folder whose config and weights the run begins with, in place of a preset with
        fresh weights. Default: none; then name, scale, depth and changes are used.
    """

    name: Word = "amor-mamba2"
    scale: Word = "tiny"
    depth: Depth = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    start: Word = ""

    def __post_init__(self) -> None:
        try:
            json.dumps(self.changes, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise AmorError(
                "changes: only finite numbers, texts, true, false, lists and tables of them"
            ) from None
        if self.start and (self.changes or self.depth):
            raise AmorError(
                f"start {self.start!r} is a whole model, so there is nothing to change of it; "
                "leave changes and depth away"
            )


@dataclass(frozen=True)
class Optimiser:
    """[optimiser]: AdamW, with gradient clipping. Defaults are the paper's where it names a value.

    betas: decay of the two moments per update.
    eps: added to the root of the second moment. The paper does not name it; this is torch's
        default.
    weight_decay: per update and unit of learning rate, on matrices only (see optim.py).
    clip: largest norm of the whole gradient; a larger one is scaled down to it.
    spike: a gradient norm above this many times the median of the last 100 is recorded as a spike;
        0: never. Default 10: far outside the spread of norms in a healthy run.
    skip_spikes: whether a step with a spike changes nothing. Default false, as in the paper.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Size = 1e-8
    weight_decay: Size = 0.1
    clip: AboveZero = 1.0
    spike: Size = 10.0
    skip_spikes: bool = False


@dataclass(frozen=True)
class Rates:
    """[lr]: learning rates: a linear warm-up to the peak, then a cosine to the floor (optim.shape).

    Defaults are the paper's at 180M parameters.

    peak: of all parameters but alpha.
    floor: at the last step.
    warmup: steps from 0 to the peak.
    alpha: peak for the scales alpha of the gated blocks, which follow the same shape.
    """

    peak: AboveZero = 3e-4
    floor: Rate = 1e-5
    warmup: Steps = 2000
    alpha: Rate = 3e-3

    def __post_init__(self) -> None:
        if self.floor > self.peak:
            raise AmorError(f"lr: floor {self.floor} lies above peak {self.peak}")


@dataclass(frozen=True)
class EvalSchedule:
    """[eval]: evaluation on the validation split.

    every: steps between two evaluations, and one at the end; 0: never.
    windows: sequences of `context` tokens that are read each time, always the same ones. Default
        64: at tiny's context 16 thousand tokens, as many as in four steps.
    """

    every: Steps = 250
    windows: Every = 64


@dataclass(frozen=True)
class CheckpointPolicy:
    """[checkpoint]: when a checkpoint is written, and which ones are kept.

    every: steps between two checkpoints, and one at the end. At most these are lost in a crash.
    keep_last: how many of the newest are kept. Default 2: if the newest is damaged, the run resumes
        from the one before.
    keep_best: whether the one with the lowest validation nll is kept besides, as RUN/best.
    keep_every: every checkpoint at a multiple of this many steps is kept for good; 0 (default):
        none.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "latest": "keep_last",
        "best": "keep_best",
        "milestones": "keep_every",
    }
    every: Every = 250
    keep_last: Every = 2
    keep_best: bool = True
    keep_every: Steps = 0


@dataclass(frozen=True)
class Recipe:
    """A training run, without the machine it runs on.

    name: of the run; RUN is runs/<name> by default. A recipe file without one has its file's name.
    model: what is trained.
    data: a folder written by `amor prepare`: train/ and, for evaluation, valid/.
    task: in place of data, a generated task: its kind and options. It fixes context and vocabulary.
    documents: "joined" (default, as in the paper): a window is read as one text; "apart": a
        document sees nothing of the one before it in its window.
    context: tokens per sequence. Default: that of the scale tiny.
    batch: sequences per optimiser step, over all micro-batches and ranks.
    micro_batch: sequences per forward on one rank; smaller needs less memory, the step stays the
        same up to rounding.
    steps: optimiser steps. Give this or `tokens`.
    tokens: tokens to train on: steps = tokens // (batch * context).
    optimiser: AdamW and clipping.
    lr: learning rates.
    seed: of the first weights, the order of data and the sample of measured gains. Default: the
        paper's.
    precision: "float32" (default: exact on any machine); "bf16": autocast on a GPU; "bf16-cpu": the
        same on a CPU, which is slower there unless it has bf16 units.
    device: "auto" (default): a GPU where there is one; "cpu"; "cuda".
    recompute: compute a layer's activations again in the backward pass instead of keeping them:
        less memory for about a third more time. Default false: small models fit.
    compile: torch.compile every layer, on a GPU only. Default false: not measured on a GPU yet.
    eval: when the model is evaluated.
    checkpoint: when checkpoints are written and which are kept.
    freeze: "none" (default); "backbone": only the gated blocks are trained, the rest stays to the
        bit.
    open_steps: first steps in which every block fires on every token, while gates take in scores
        and learn; they decide from then on. Default 0: gates decide from the first step, as in the
        paper.
    distributed: "none" (default): one process; "ddp": replicas; "fsdp": sharded (FSDP2). The last
        two are for processes started by torchrun.
    track: also log to "tensorboard", "wandb" or "trackio", or several of them with commas.
    verify: read every data shard and compare its hash before the first step. Default true: it takes
        seconds per GB, and a flipped bit in the data is otherwise never noticed.
    """

    name: Annotated[Word, Meta(min_length=1)] = "run"
    model: ModelChoice = ModelChoice()
    data: Word = ""
    task: Mapping[str, Any] = field(default_factory=dict)
    documents: str = "joined"
    context: Context = 256
    batch: Sequences = 16
    micro_batch: Sequences = 16
    steps: Steps = 0
    tokens: typed.Count = 0
    optimiser: Optimiser = Optimiser()
    lr: Rates = Rates()
    seed: Seed = 42
    precision: str = "float32"
    device: Word = "auto"
    recompute: bool = False
    compile: bool = False
    eval: EvalSchedule = EvalSchedule()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    freeze: str = "none"
    open_steps: Steps = 0
    distributed: str = "none"
    track: Word = ""
    verify: bool = True

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise AmorError(f"{name}: no {value!r}; {nearest(value, choices)}")
        if self.task:
            self._fit_to_task()
        if (self.steps > 0) == (self.tokens > 0):
            raise AmorError(
                f"give steps or tokens, one of the two, above 0; here steps = {self.steps}, "
                f"tokens = {self.tokens}"
            )
        if not self.total_steps:
            raise AmorError(
                f"tokens is {self.tokens:,}, less than one step of {self.step_tokens:,}"
            )

    def _fit_to_task(self) -> None:
        """Take context and vocabulary from the task, and write out its every option."""
        if self.data:
            raise AmorError(
                f"data {self.data!r} and a task are given; a run learns from one of the two"
            )
        if self.model.start:
            raise AmorError(
                "a task is learned from the beginning; "
                f"model.start {self.model.start!r} has another vocabulary"
            )
        task = read_task(self.task)
        if self.context not in (type(self).context, task.length):
            raise AmorError(
                f"context {self.context}: rows of task {task.kind} are {task.length} tokens long; "
                "leave context away"
            )
        vocab = typed.flat(self.model.changes).get("vocab", task.vocab)
        if isinstance(vocab, int) and vocab < task.vocab:
            raise AmorError(
                f"model.changes.vocab {vocab}: task {task.kind} has {task.vocab} tokens; "
                "leave it away, or give as many"
            )
        model = dataclasses.replace(self.model, changes={**self.model.changes, "vocab": vocab})
        for key, value in {"task": task.tree, "context": task.length, "model": model}.items():
            object.__setattr__(self, key, value)

    @property
    def step_tokens(self) -> int:
        """Tokens per optimiser step."""
        return self.batch * self.context

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps or self.tokens // self.step_tokens

    def config(self) -> Config:
        """The config of the model that is trained."""
        if self.model.start:
            return load_config(self.model.start).change(context=self.context)
        # not by keywords of preset, which has a name and a scale of its own
        base = preset(self.model.name, self.model.scale, self.model.depth or None)
        return base.change(**{"context": self.context, **typed.flat(self.model.changes)})

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for a file."""
        tree = dataclasses.asdict(self)
        tree["optimiser"]["betas"] = list(self.optimiser.betas)
        return tree

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """A recipe from plain values; where: what an error calls them, such as a file's path."""
        return typed.convert(cls, tree, where)


def load(
    name: str | Path, changes: Iterable[str] = (), model: str | None = None, /, **keys: Any
) -> Recipe:
    """A recipe by path or name, with changes; later ones win.

    changes: "key=value" texts, as of --set. model: a preset that replaces the recipe's model.name.
    keys: fields of the recipe, set last; None leaves one as it is.
    """
    path = find(name)
    tree = {"name": path.stem, **typed.extended(path)}
    if path == HOME / TINY / "base.toml":
        suffix = str(name).removeprefix(f"{TINY}/")
        tree["name"] = model = model or (suffix if suffix in every_name() else ModelChoice.name)
    elif model:
        tree["name"] = f"{tree['name']}-{model}"
    if model:
        typed.set_key(tree, "model.name", model, "--model")
    for key, value in typed.assignments(changes, "lr.peak=1e-3").items():
        typed.set_key(tree, key, value, "--set")
    tree |= {key: value for key, value in keys.items() if value is not None}
    if keys.get("steps"):
        tree["tokens"] = 0
    recipe = Recipe.from_dict(tree, str(path))
    if model and recipe.model.start:
        raise AmorError(
            f"--model {model}: the run starts from {recipe.model.start}; leave one of the two away"
        )
    return recipe


def fit_warmup(recipe: Recipe) -> Recipe:
    """The recipe with a warm-up of at most a tenth of its steps.

    For runs whose number of steps was shortened: the recipe's own warm-up might end after them.
    """
    warmup = min(recipe.lr.warmup, max(recipe.total_steps // 10, 1))
    return dataclasses.replace(recipe, lr=dataclasses.replace(recipe.lr, warmup=warmup))


def find(name: str | Path) -> Path:
    """The file of a recipe: by path, or by name as listed by `names` ("paper/180m")."""
    for path in (Path(name), Path(f"{name}.toml"), HOME / name, HOME / f"{name}.toml"):
        try:
            if path.is_file():
                return path
        except OSError:  # a name that no file can have
            continue
    if str(name) == TINY or str(name) in _tiny_names():
        return HOME / TINY / "base.toml"
    raise AmorError(f"no recipe {str(name)!r}; {nearest(str(name), names())}")


def file_names() -> list[str]:
    """The recipes of the package that are files; studies lie beside them."""
    files = (p for p in HOME.glob("*/*.toml") if p.parent.name != "studies")
    return sorted(str(p.relative_to(HOME).with_suffix("")) for p in files)


def names() -> list[str]:
    """Every recipe of the package: its files, and tiny/<preset> for every preset."""
    return sorted({*file_names(), *_tiny_names()})


def _tiny_names() -> list[str]:
    return [f"{TINY}/{name}" for name in every_name()]
