"""What is run, as frozen data: a TOML file, what it extends, and what the command line changes.

An unknown key, a wrong type or an impossible number is refused here, before anything is built.
"""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amor.checks import at_least
from amor.config import Config, fill, flat
from amor.errors import AmorError, nearest
from amor.presets import preset

HOME = Path(__file__).parents[1] / "recipes"
CHOICES = {
    "documents": ("joined", "apart"),
    "precision": ("float32", "bf16", "bf16-cpu"),
    "distributed": ("none", "ddp", "fsdp"),
}


@dataclass(frozen=True)
class Model:
    """A preset by name and scale, and keys of it to change, e.g. {"blocks.count": 1}."""

    name: str = "amor-mamba2"
    scale: str = "tiny"
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimiser:
    """AdamW with decay on matrices only, and the clip on the norm of the whole gradient."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    spike: float = 10.0  # a gradient norm above this many times the median of the last ones is said; 0: never
    skip_spikes: bool = False  # and such a step changes nothing

    def check(self) -> None:
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise AmorError(f"optimiser.betas: {list(self.betas)} must be two numbers in [0, 1), e.g. [0.9, 0.95]")
        for name in ("eps", "weight_decay", "spike"):
            at_least(f"optimiser.{name}", getattr(self, name), 0)
        if not self.clip > 0:
            raise AmorError(f"optimiser.clip is {self.clip}; it must be above 0")


@dataclass(frozen=True)
class Rates:
    """Learning rates: warm-up to the peak, then a cosine to the floor. alpha has a peak of its own and the same shape."""

    peak: float = 3e-4
    floor: float = 1e-5
    warmup: int = 2000
    alpha: float = 3e-3

    def check(self) -> None:
        if not self.peak > 0 or not 0 <= self.floor <= self.peak:
            raise AmorError(f"lr: floor {self.floor} and peak {self.peak} must satisfy 0 <= floor <= peak, peak above 0")
        at_least("lr.warmup", self.warmup, 0)
        at_least("lr.alpha", self.alpha, 0)


@dataclass(frozen=True)
class Evaluation:
    """How often to judge the model on the validation split, and on how many windows of it; 0: never."""

    every: int = 250
    windows: int = 64

    def check(self) -> None:
        at_least("eval.every", self.every, 0)
        at_least("eval.windows", self.windows, 1)


@dataclass(frozen=True)
class Keeping:
    """When a checkpoint is written and which ones stay."""

    every: int = 250
    latest: int = 2  # the newest ones
    best: bool = True  # the one with the lowest validation nll
    milestones: int = 0  # every one at a multiple of this many steps; 0: none

    def check(self) -> None:
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.latest", self.latest, 1)
        at_least("checkpoint.milestones", self.milestones, 0)


SECTIONS = {"model": Model, "optimiser": Optimiser, "lr": Rates, "eval": Evaluation, "checkpoint": Keeping}


@dataclass(frozen=True)
class Recipe:
    """A training run, without the machine it runs on."""

    name: str = "run"
    model: Model = Model()
    data: str = ""  # a folder of `amor prepare`: train/ and, for evaluation, valid/
    documents: str = "joined"  # "apart": a document sees nothing of the one before it in its window
    context: int = 256
    batch: int = 16  # sequences an optimiser step, over all micro-batches and ranks
    micro_batch: int = 16  # sequences at a time on one rank
    steps: int = 0  # give steps, or tokens: steps = tokens // (batch * context)
    tokens: int = 0
    optimiser: Optimiser = Optimiser()
    lr: Rates = Rates()
    seed: int = 42
    precision: str = "float32"
    device: str = "auto"
    recompute: bool = False  # compute a layer's activations again in the backward pass instead of keeping them
    compile: bool = False
    eval: Evaluation = Evaluation()
    checkpoint: Keeping = Keeping()
    distributed: str = "none"
    track: str = ""  # also tell "tensorboard", "wandb" or "trackio", or several of them
    verify: bool = True  # read every shard and compare it with its hash before the first step

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise AmorError(f"{name}: no {getattr(self, name)!r}; {nearest(getattr(self, name), choices)}")
        for name in ("context", "batch", "micro_batch"):
            at_least(name, getattr(self, name), 1)
        for section in (self.optimiser, self.lr, self.eval, self.checkpoint):
            section.check()
        if (self.steps > 0) == (self.tokens > 0):
            raise AmorError(f"give steps or tokens, one of the two, above 0; here steps = {self.steps}, tokens = {self.tokens}")
        if not self.total_steps:
            raise AmorError(f"tokens is {self.tokens:,}, less than one step of {self.step_tokens:,}")

    @property
    def step_tokens(self) -> int:
        return self.batch * self.context

    @property
    def total_steps(self) -> int:
        return self.steps or self.tokens // self.step_tokens

    def config(self) -> Config:
        return preset(self.model.name, self.model.scale, context=self.context, **flat(self.model.changes))

    def to_dict(self) -> dict[str, Any]:
        tree = dataclasses.asdict(self)
        tree["optimiser"]["betas"] = list(self.optimiser.betas)
        return tree

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "Recipe":
        values = dict(tree)
        for name, section in SECTIONS.items():
            if name in values:
                if not isinstance(values[name], Mapping):
                    raise AmorError(f"{name}: {values[name]!r} is not a table; write [{name}]")
                values[name] = fill(section, _tuples(values[name]), name)
        return fill(cls, values, "recipe")


def _tuples(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) and key == "betas" else value for key, value in tree.items()}


def load(given: str | Path, changes: Iterable[str] = (), **keys: Any) -> Recipe:
    """A recipe file with `key=value` changes, the later ones winning; keys by keyword come last."""
    path = find(given)
    tree = {"name": path.stem, **_read(path, ())}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise AmorError(f"--set {change}: write key=value, e.g. --set lr.peak=1e-3")
        _put(tree, key.strip(), _value(value.strip()))
    for key, value in keys.items():
        tree[key] = value
    if keys.get("steps"):
        tree["tokens"] = 0
    return Recipe.from_dict(tree)


def find(given: str | Path) -> Path:
    """A recipe by path, or by its name in amor/recipes/ ('tiny/amor-mamba2')."""
    for path in (Path(given), Path(f"{given}.toml"), HOME / given, HOME / f"{given}.toml"):
        if path.is_file():
            return path
    names = [str(p.relative_to(HOME).with_suffix("")) for p in HOME.glob("*/*.toml")]
    raise AmorError(f"no recipe {str(given)!r}; {nearest(str(given), names)}")


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The tree of a file on top of what it extends."""
    path = path.resolve()
    if path in seen:
        raise AmorError(f"{path} extends itself by way of {seen[-1]}")
    try:
        tree = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise AmorError(f"{path} is not TOML ({error})") from error
    base = tree.pop("extends", None)
    if base is None:
        return tree
    below = path.parent / base
    if not below.is_file():
        raise AmorError(f"{path} extends {base!r}, which is not there")
    return _over(_read(below, (*seen, path)), tree)


def _over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees as one, the upper winning key by key."""
    out = dict(base)
    for key, value in top.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _over(out[key], value) if both else value
    return out


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; what a model changes is itself written with dots, so that part is one key."""
    head, _, rest = key.partition(".")
    if not rest:
        tree[key] = value
        return
    if head == "changes":
        tree[head] = flat(tree.get(head, {})) | {rest: value}
        return
    if not isinstance(tree.get(head, {}), Mapping):
        raise AmorError(f"--set {key}: {head!r} is {tree[head]!r} and has nothing inside")
    tree[head] = dict(tree.get(head, {}))
    _put(tree[head], rest, value)


def _value(text: str) -> Any:
    """A value as TOML writes it; what is not TOML is a text, so that names need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
