"""The configuration of a model, as frozen data.

Every wrong key and impossible shape is refused here, by options alone: no module is built.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from amor import checks, registry, typed
from amor.checks import MOST_LAYERS, MOST_PARAMETERS, divides, even_heads
from amor.errors import AmorError, nearest

VERSION = 1  # of config.json


def read_pattern(given: str | Mapping[str, Any]) -> tuple[str, ...]:
    """The mixer kind of every layer, one per layer.

    Given as 'mamba2 x4, attention, mamba2 x7', or as {'mamba2': 12, 'attention': [4]}.
    """
    if isinstance(given, Mapping):
        return _placed(given)
    layers: list[str] = []
    for part in filter(None, (p.strip() for p in given.split(","))):
        match = re.fullmatch(r"(\S+?)(?:\s+x\s*(\d{1,18}))?", part)
        if not match:
            raise AmorError(
                f"pattern: cannot read {part[:80]!r}; write it like "
                "'mamba2 x4, attention, mamba2 x7'"
            )
        count = int(match[2] or 1)
        _few(len(layers) + count)
        layers += [match[1]] * count
    return tuple(layers)


def _placed(given: Mapping[str, Any]) -> tuple[str, ...]:
    """One kind everywhere (its depth is the value), others at the layers listed."""
    bases = [kind for kind, value in given.items() if type(value) is int]
    others = {kind: places for kind, places in given.items() if isinstance(places, list | tuple)}
    if len(bases) != 1 or len(others) != len(given) - 1:
        raise AmorError(
            "pattern: needs one kind with a depth and others with their layers, "
            "e.g. {'mamba2': 12, 'attention': [4, 8]}"
        )
    depth = given[bases[0]]
    _few(depth)
    layers = bases * depth
    for kind, places in others.items():
        for place in places:
            if type(place) is not int or not 0 <= place < depth:
                raise AmorError(f"pattern: layer {place!r} for {kind!r} is outside 0..{depth - 1}")
            layers[place] = kind
    return tuple(layers)


def _few(layers: int) -> None:
    if layers > MOST_LAYERS:
        raise AmorError(f"pattern: more than {MOST_LAYERS} layers")


NORMS = (  # which norms can have an epsilon of their own
    "mixer_norm",  # before the mixer of a layer
    "mixer",  # inside a mixer
    "mlp_norm",  # before the MLP of a layer
    "norm_f",  # behind the layers
    "block",  # inside the gated blocks
    "final_norm",  # behind the gated blocks
)
CONV_INITS = ("normal", "uniform")
CHOICES = {  # allowed values of the keys of Blocks that are names
    "first": ("plain", "prenorm"),
    "probe": ("block", "final"),
    "decide": ("each", "once"),
    "final": ("norm", "none"),
}


@dataclass(frozen=True)
class Blocks:
    """The K gated attention blocks behind the backbone. count = 0 means a plain backbone.

    The defaults are the paper's.
    """

    count: checks.Blocks = 0  # K
    # "plain": the output of norm_f is the residual of block 0; "prenorm": norm_f is the pre-norm of
    # block 0, and the residual stays unnormalised
    first: str = "plain"
    mlp: bool = False  # a SwiGLU of width d_ff behind the attention of every block
    head_size: checks.HeadSize = 64  # channels per head; width / head_size heads
    rope_theta: checks.Theta = 10_000.0  # base of the rotary frequencies
    gate: str = "entropy"  # a kind of amor/gates, or package.module.Class
    gate_options: Mapping[str, Any] = field(default_factory=dict)  # of that gate's Options
    # the vector whose next-token distribution gates look at: the input of the "block", or the
    # residual before it through the "final" norm
    probe: str = "block"
    decide: str = "each"  # "each" block has a gate, or "once": the one of block 0 decides for all
    # a "norm" behind the blocks, or "none": where no gate fires, the head then reads the backbone's
    # own output
    final: str = "norm"
    # lower bound of alpha, below which a channel gets no gradient; 0: the paper's plain sigmoid
    alpha_floor: checks.Floor = 0.0

    def check(self, width: int) -> None:
        """Refuse names outside CHOICES, and shapes that cannot be built at a model width."""
        for key, words in CHOICES.items():
            if getattr(self, key) not in words:
                raise AmorError(
                    f"blocks.{key}: no {getattr(self, key)!r}; {nearest(getattr(self, key), words)}"
                )
        if self.final == "none" and self.first == "prenorm":
            raise AmorError(
                'blocks.final "none" needs blocks.first "plain": with "prenorm" no norm would '
                "stand before the head"
            )
        if self.count:
            divides("blocks.head_size", width, self.head_size, "head size")
            even_heads("blocks.head_size", self.head_size)
        self.options()

    def parameters(self, width: int, d_ff: int) -> int:
        """Exact number of parameters of all blocks and of the norm behind them."""
        if not self.count:
            return 0
        attention, alpha, mlp = 4 * width**2, width, 3 * width * d_ff + width if self.mlp else 0
        norms = self.count - 1 + (self.final == "norm")  # block 0 has none
        gates, options = 1 if self.decide == "once" else self.count, self.options()
        # most gates have statistics only and count nothing
        per_gate = options.parameters(width) if hasattr(options, "parameters") else 0
        return self.count * (attention + alpha + mlp) + norms * width + gates * per_gate

    def options(self) -> Any:
        """The options of the gate."""
        return typed.convert(
            registry.find("gates", self.gate).Options, self.gate_options, f"gate {self.gate}"
        )


@dataclass(frozen=True)
class Config:
    """A whole model: embedding, a pattern of mixers, gated blocks, head.

    The ranges of its numbers are in checks.py.
    """

    name: str  # for people: of run folders, tables and model cards
    vocab: checks.Vocab  # rows of the embedding
    width: checks.Width  # channels of the residual stream
    d_ff: checks.InnerWidth  # hidden width of the MLPs; 0: layers have none
    pattern: checks.Pattern  # the mixer kind of every layer; `read_pattern` reads shorter forms
    context: checks.Context = 3072  # tokens per row in training, the paper's; decode may go beyond
    norm_eps: checks.Eps = 1e-5  # of every norm that norm_eps_of does not name
    # epsilon by norm, one of NORMS
    norm_eps_of: Mapping[str, checks.Eps] = field(default_factory=dict)
    # standard deviation of initial weights, the paper's at widths of 768 and more
    init_std: checks.Std = 0.02
    # short convolutions: "normal" as all other weights, or "uniform" in +-1/sqrt(taps), the
    # default of nn.Conv1d
    conv_init: str = "normal"
    tied: bool = True  # the head's weights are the embedding's; false: it has its own
    mixers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options by mixer kind
    blocks: Blocks = Blocks()
    version: int = VERSION  # of the file format

    # keys of older files -> their names now
    RENAMED: ClassVar[Mapping[str, str]] = {"init_spread": "init_std"}

    def __post_init__(self) -> None:
        if isinstance(self.pattern, str | Mapping):
            object.__setattr__(self, "pattern", read_pattern(self.pattern))
        if isinstance(self.blocks, Mapping):
            object.__setattr__(self, "blocks", typed.convert(Blocks, self.blocks, "blocks"))
        object.__setattr__(self, "pattern", tuple(self.pattern))
        self._check()

    def _check(self) -> None:
        if self.version != VERSION:
            raise AmorError(f"of version {self.version}; this amor reads version {VERSION}")
        if self.blocks.mlp and not self.d_ff:
            raise AmorError(
                "blocks.mlp is true but d_ff is 0; give the MLP a width, e.g. d_ff=1216"
            )
        if not self.pattern:
            raise AmorError("pattern is empty; give at least one layer, e.g. 'mamba2 x12'")
        for norm in self.norm_eps_of:
            if norm not in NORMS:
                raise AmorError(f"norm_eps_of: no norm {norm!r}; {nearest(norm, NORMS)}")
        if self.conv_init not in CONV_INITS:
            raise AmorError(
                f"conv_init: no {self.conv_init!r}; {nearest(self.conv_init, CONV_INITS)}"
            )
        for kind in self.mixers:
            self._options(kind)
        for kind in sorted(set(self.pattern)):
            self.mixer_options(kind)
        self.blocks.check(self.width)
        if self.parameters > MOST_PARAMETERS:
            raise AmorError(
                f"{self.parameters:.2g} parameters; more than {MOST_PARAMETERS:.2g} are a slip, "
                "so they are refused"
            )

    def _options(self, kind: str) -> Any:
        return typed.convert(
            registry.find("mixers", kind).Options, self.mixers.get(kind, {}), f"mixers.{kind}"
        )

    def mixer_options(self, kind: str) -> Any:
        """The checked options of one mixer kind at this width."""
        options = self._options(kind)
        if not isinstance(options, checks.MixerOptions):
            raise AmorError(
                f"mixers: the Options of {kind!r} need check(width) and parameters(width), as "
                "MixerOptions in amor/checks.py has them"
            )
        options.check(self.width)
        return options

    def gate_options(self) -> Any:
        """The checked options of the gate."""
        return self.blocks.options()

    def eps(self, norm: str) -> float:
        """The epsilon of a norm, one of NORMS."""
        return self.norm_eps_of.get(norm, self.norm_eps)

    @property
    def parameters(self) -> int:
        """Exact number of parameters of the model, counted by its options; nothing is built."""
        embedding = self.vocab * self.width * (1 if self.tied else 2)
        mlp = 3 * self.width * self.d_ff + self.width if self.d_ff else 0  # with the norm before it
        mixers = sum(
            self.pattern.count(kind) * self.mixer_options(kind).parameters(self.width)
            for kind in sorted(set(self.pattern))
        )
        layers = mixers + len(self.pattern) * (self.width + mlp)
        return embedding + layers + self.width + self.blocks.parameters(self.width, self.d_ff)

    def change(self, /, **changes: Any) -> "Config":
        """A copy with keys changed; dotted keys reach inside.

        config.change(**{"blocks.count": 1, "blocks.gate_options.kappa": 0.3})
        """
        tree = self.to_dict()
        for key, value in changes.items():
            typed.set_key(tree, key, value, "config")
        return Config.from_dict(tree)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as config.json holds them; `from_dict` reads them."""
        tree = dataclasses.asdict(self)
        tree["pattern"] = list(self.pattern)
        return tree

    def to_json(self) -> str:
        """The text of config.json."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "config") -> "Config":
        """A config from plain values; `where` names them in errors."""
        if not isinstance(tree, Mapping):
            raise AmorError(f"{where}: expected an object of keys, not {type(tree).__name__}")
        missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING
                   and f.default_factory is dataclasses.MISSING and f.name not in tree]  # fmt: skip
        if missing:
            raise AmorError(f"{where}: {', '.join(missing)} missing")
        pattern = tree["pattern"]
        try:
            read = read_pattern(pattern) if isinstance(pattern, str | Mapping) else pattern
        except AmorError as error:
            raise AmorError(f"{where}: {error}") from None
        return typed.convert(cls, {**tree, "pattern": read}, where)
