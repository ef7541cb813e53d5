"""Another gate for a trained model, given in words: always, never, random:0.3, or its own kind aimed at a firing rate."""

from amor import registry
from amor.config import fill
from amor.errors import AmorError, nearest
from amor.gates.base import Gate
from amor.models.amor import Amor

# gates that need nothing they would have had to learn
FREE = ("always", "never", "random")


def regate(model: Amor, words: str | None = None, rate: float | None = None) -> None:
    """Exchange the gate of every block, and aim it at a firing rate."""
    if (words or rate is not None) and not model.blocks:
        raise AmorError(f"{model.config.name} has no gated blocks, so there is no gate to set")
    for index, block in enumerate(model.each_block()):
        if words:
            block.gate = spelled(model, index, words)
        if rate is not None:
            block.gate.aim(rate)


def spelled(model: Amor, index: int, words: str) -> Gate:
    """The gate that `kind` or `random:rate` means for block `index`."""
    kind, _, value = words.partition(":")
    own = model.each_block()[index].gate
    if kind == own.kind and not value:
        return own
    if kind not in FREE:
        raise AmorError(f"--gate {words}: this model's own gate is {own.kind!r}; besides it, {nearest(kind, FREE)}")
    if value and kind != "random":
        raise AmorError(f"--gate {words}: {kind!r} takes no number; only random does, e.g. random:0.3")
    cls: type[Gate] = registry.find("gates", kind)
    try:
        options = fill(cls.Options, {"rate": float(value)} if value else {}, f"gate {kind}")
    except ValueError:
        raise AmorError(f"--gate {words}: {value!r} is not a number; write for instance random:0.3") from None
    options.check()
    return cls(model.config.width, options, index)
