"""What a model is, as frozen data: every wrong key and impossible shape is refused here, before anything is built."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amor import registry
from amor.checks import at_least, divides, even_heads
from amor.errors import AmorError, nearest


def read_pattern(given: str | Mapping[str, Any]) -> tuple[str, ...]:
    """'mamba2 x4, attention, mamba2 x7', or {'mamba2': 12, 'attention': [4]}: one mixer kind a layer."""
    if isinstance(given, Mapping):
        return _placed(given)
    layers: list[str] = []
    for part in filter(None, (p.strip() for p in given.split(","))):
        match = re.fullmatch(r"(\S+?)(?:\s+x\s*(\d+))?", part)
        if not match:
            raise AmorError(f"pattern: cannot read {part!r}; write it like 'mamba2 x4, attention, mamba2 x7'")
        layers += [match[1]] * int(match[2] or 1)
    return tuple(layers)


def _placed(given: Mapping[str, Any]) -> tuple[str, ...]:
    """One kind everywhere (its depth is the value), others at the layers listed."""
    bases = [kind for kind, value in given.items() if isinstance(value, int)]
    if len(bases) != 1:
        raise AmorError(f"pattern: {dict(given)} needs one kind with a depth, e.g. {{'mamba2': 12, 'attention': [4, 8]}}")
    depth = given[bases[0]]
    layers = [bases[0]] * depth
    for kind, places in given.items():
        for place in [] if kind == bases[0] else places:
            if not 0 <= place < depth:
                raise AmorError(f"pattern: layer {place} for {kind!r} is outside 0..{depth - 1}")
            layers[place] = kind
    return tuple(layers)


def fill(cls: type, given: Mapping[str, Any], where: str) -> Any:
    """Build an options dataclass from a mapping; an unknown key or a wrong type is an error that says so."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in given:
        if key not in fields:
            raise AmorError(f"{where}: no key {key!r}; {nearest(key, fields)}")
    values = {key: _typed(value, fields[key].type, f"{where}.{key}") for key, value in given.items()}
    return cls(**values)


def _typed(value: Any, wanted: Any, where: str) -> Any:
    """Refuse a value of the wrong type; an int is welcome where a float is wanted, a bool never passes as a number."""
    if wanted is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise AmorError(f"{where}: {value!r} is not a whole number")
    if wanted is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise AmorError(f"{where}: {value!r} is not a number")
        return float(value)
    if wanted is bool and not isinstance(value, bool):
        raise AmorError(f"{where}: {value!r} is neither true nor false")
    if wanted is str and not isinstance(value, str):
        raise AmorError(f"{where}: {value!r} is not a text")
    return value


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{'blocks': {'count': 1}} -> {'blocks.count': 1}; a pattern is one value."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and name != "pattern":
            out |= flat(value, f"{name}.")
        else:
            out[name] = value
    return out


@dataclass(frozen=True)
class Blocks:
    """The K gated attention blocks behind the backbone. count = 0 means a plain backbone."""

    count: int = 0
    first: str = "plain"  # block 0 takes norm_f's output "plain", or "prenorm": norm_f is its pre-norm, residual unnormalised
    mlp: bool = False
    head_size: int = 64
    rope_theta: float = 10_000.0
    gate: str = "entropy"
    gate_options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, width: int) -> None:
        at_least("blocks.count (K)", self.count, 0)
        if self.first not in ("plain", "prenorm"):
            raise AmorError(f"blocks.first: no {self.first!r}; {nearest(self.first, ['plain', 'prenorm'])}")
        divides("blocks.head_size", width, self.head_size, "head size")
        even_heads("blocks.head_size", self.head_size)
        at_least("blocks.rope_theta", self.rope_theta, 1)
        gate = registry.find("gates", self.gate)
        fill(gate.Options, self.gate_options, f"gate {self.gate}").check()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Config:
    """A whole model: embedding, a pattern of mixers, gated blocks, tied head."""

    name: str
    vocab: int
    width: int
    d_ff: int  # of the MLPs; 0: layers have none
    pattern: tuple[str, ...]
    context: int = 3072
    norm_eps: float = 1e-5
    mixers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options by mixer kind
    blocks: Blocks = Blocks()

    def __post_init__(self) -> None:
        if isinstance(self.pattern, str | Mapping):
            object.__setattr__(self, "pattern", read_pattern(self.pattern))
        object.__setattr__(self, "pattern", tuple(self.pattern))
        if isinstance(self.blocks, Mapping):
            object.__setattr__(self, "blocks", fill(Blocks, self.blocks, "blocks"))
        self._check()

    def _check(self) -> None:
        if self.vocab < 2:
            raise AmorError(f"vocab is {self.vocab}; entropy over log(vocab) needs at least 2 tokens")
        for name in ("width", "context"):
            at_least(name, getattr(self, name), 1)
        at_least("d_ff", self.d_ff, 0)
        if self.blocks.mlp and not self.d_ff:
            raise AmorError("blocks.mlp is true but d_ff is 0; give the MLP a width, e.g. d_ff=1216")
        if not self.norm_eps > 0:
            raise AmorError(f"norm_eps is {self.norm_eps}; it must be above 0, e.g. 1e-5")
        if not self.pattern:
            raise AmorError("pattern is empty; give at least one layer, e.g. 'mamba2 x12'")
        for kind in self.mixers:
            registry.find("mixers", kind)
        for kind in sorted(set(self.pattern)):
            self.mixer_options(kind)
        if self.blocks.count:
            self.blocks.check(self.width)
        at_least("blocks.count (K)", self.blocks.count, 0)

    def mixer_options(self, kind: str) -> Any:
        """The checked options of one mixer kind at this width."""
        mixer = registry.find("mixers", kind)
        options = fill(mixer.Options, self.mixers.get(kind, {}), f"mixers.{kind}")  # type: ignore[attr-defined]
        options.check(self.width)
        return options

    def gate_options(self) -> Any:
        gate = registry.find("gates", self.blocks.gate)
        return fill(gate.Options, self.blocks.gate_options, f"gate {self.blocks.gate}")  # type: ignore[attr-defined]

    def change(self, **changes: Any) -> "Config":
        """A copy with keys changed; dotted keys reach inside: change(**{'blocks.count': 1, 'blocks.gate_options.kappa': 0.3})."""
        tree = self.to_dict()
        for key, value in changes.items():
            _set(tree, key, value)
        return Config.from_dict(tree)

    def to_dict(self) -> dict[str, Any]:
        tree = dataclasses.asdict(self)
        tree["pattern"] = list(self.pattern)
        return tree

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "Config":
        missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING
                   and f.default_factory is dataclasses.MISSING and f.name not in tree]  # fmt: skip
        if missing:
            raise AmorError(f"config: {', '.join(missing)} missing")
        return fill(cls, tree, "config")


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if not rest:
        tree[key] = value
        return
    branch = tree.get(head, {})  # a wrong name makes a new branch here, and is refused when the config is filled
    if not isinstance(branch, Mapping):
        raise AmorError(f"config: {head!r} is {branch!r}, so {key!r} reaches nothing")
    tree[head] = dict(branch)
    _set(tree[head], rest, value)
