"""The eight architectures at four scales, the paper's ablations and our variants, as data.

The pattern of layers follows the paper: a serial hybrid replaces the mixer by attention at some
layers, a fused hybrid runs attention beside Mamba2 at the first, a middle and the last layer, AMOR
adds three gated blocks behind the backbone. Any other mixer the registry finds is an architecture
by its own name, everywhere; with `amor-` before it, behind gated blocks.
"""

from collections.abc import Iterable
from typing import Any

from amor import registry
from amor.config import Config
from amor.errors import AmorError, nearest

SCALES: dict[str, dict[str, Any]] = {
    "tiny": dict(width=256, depth=4, d_ff=512, vocab=4096, context=256),
    "180m": dict(width=768, depth=12, d_ff=1216, vocab=128_256, context=3072),
    "440m": dict(width=1024, depth=24, d_ff=1984, vocab=128_256, context=3072),
    "1.5b": dict(width=2048, depth=24, d_ff=4096, vocab=128_256, context=3072),
}

# depth -> where attention stands (zero-based)
SERIAL: dict[int, tuple[int, ...]] = {2: (1,), 4: (2,), 12: (4, 8), 24: (6, 12, 18)}
FUSED: dict[int, tuple[int, ...]] = {2: (0, 1), 4: (0, 2, 3), 12: (0, 6, 11), 24: (0, 12, 23)}

# name -> (mixer everywhere, mixer at the special layers, where those are, K)
ARCHITECTURES: dict[str, tuple[str, str, dict[int, tuple[int, ...]], int]] = {
    "transformer": ("attention", "", {}, 0),
    "mamba2": ("mamba2", "", {}, 0),
    "gated-deltanet": ("gated_deltanet", "", {}, 0),
    "mamba2-serial": ("mamba2", "attention", SERIAL, 0),
    "gated-deltanet-serial": ("gated_deltanet", "attention", SERIAL, 0),
    "mamba2-fused": ("mamba2", "fused", FUSED, 0),
    "amor-mamba2": ("mamba2", "", {}, 3),
    "amor-gated-deltanet": ("gated_deltanet", "", {}, 3),
}

# what an ablation changes in its AMOR model
ABLATIONS: dict[str, dict[str, Any]] = {
    "classic": {"blocks.count": 1},
    "prenorm": {"blocks.first": "prenorm"},
    "nogate": {"blocks.gate": "always"},
    "mlp": {"blocks.mlp": True},
}

# what is ours: where the gate looks, how often it decides, what it predicts (docs/gate.md)
VARIANTS: dict[str, dict[str, Any]] = {
    "final": {"blocks.probe": "final"},
    "once": {"blocks.decide": "once"},
    "gain": {"blocks.gate": "gain", "blocks.decide": "once"},
    "router": {"blocks.gate": "router"},
}
CHANGES = ABLATIONS | VARIANTS

NAMES = tuple(ARCHITECTURES)
GATED_BLOCKS = 3


def _changed(names: Iterable[str], changes: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        f"{name}-{change}" for name in names if name.startswith("amor-") for change in changes
    )


ABLATION_NAMES = _changed(NAMES, ABLATIONS)
VARIANT_NAMES = _changed(NAMES, VARIANTS)


def more_names() -> tuple[str, ...]:
    """Architectures of mixers that the paper does not have."""
    known = {
        kind
        for everywhere, special, _, _ in ARCHITECTURES.values()
        for kind in (everywhere, special)
    }
    kinds = [kind.replace("_", "-") for kind in registry.kinds("mixers") if kind not in known]
    return tuple(name for kind in kinds for name in (kind, f"amor-{kind}"))


def every_name() -> tuple[str, ...]:
    """Every preset there is, ablations and variants included."""
    more = more_names()
    return NAMES + ABLATION_NAMES + VARIANT_NAMES + more + _changed(more, CHANGES)


def architecture(name: str) -> tuple[str, str, dict[int, tuple[int, ...]], int]:
    """As a row of ARCHITECTURES."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    return (
        name.removeprefix("amor-").replace("-", "_"),
        "",
        {},
        GATED_BLOCKS if name.startswith("amor-") else 0,
    )


def scaled(scale: str) -> dict[str, Any]:
    """The row of SCALES of that name."""
    if scale not in SCALES:
        raise AmorError(f"no scale {scale!r}; {nearest(scale, SCALES)}")
    return SCALES[scale]


def preset(name: str, scale: str, depth: int | None = None, /, **changes: Any) -> Config:
    """A named architecture, ablation or variant ('amor-mamba2-classic') at a scale.

    depth: number of layers, by default the scale's; changes: any keys of Config, as its `change`.
    """
    size = scaled(scale)
    if name not in every_name():
        raise AmorError(f"no model {name!r}; {nearest(name, every_name())}")
    base, _, change = name.rpartition("-")
    if change not in CHANGES:
        base, change = name, ""
    config = Config(
        name=f"{name}-{scale}",
        vocab=size["vocab"],
        width=size["width"],
        d_ff=size["d_ff"],
        context=size["context"],
        pattern=pattern(base, size["depth"] if depth is None else depth),
    ).change(**{"blocks.count": architecture(base)[3]})
    return config.change(**CHANGES.get(change, {})).change(**changes)


def pattern(name: str, depth: int) -> tuple[str, ...]:
    """The mixer kind of every layer of an architecture of a depth."""
    everywhere, special, where, _ = architecture(name)
    places = where.get(depth, ())
    if where and not places:
        raise AmorError(
            f"{name} is laid out for depths {sorted(where)}, not {depth}; give a pattern of "
            "your own"
        )
    return tuple(special if layer in places else everywhere for layer in range(depth))
