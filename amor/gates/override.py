"""Other gates for a trained model, as `--gate` and `--fire-rate` give them.

Its gates are replaced by always, never or random:0.3, or aimed at a firing rate.
"""

import copy
from collections.abc import Sequence
from typing import Any

from amor import typed
from amor.errors import AmorError, nearest
from amor.gates.base import Gate, find_gate
from amor.gates.follower import share_decision

# gates without statistics or weights, so any model can have them
STATELESS = ("always", "never", "random")


def override_gates(
    own: Sequence[Gate], words: str | None = None, rate: float | None = None
) -> list[Gate]:
    """The gates that a command line selects, one per block.

    A model's own are not changed, an aimed one is a copy.
    """
    if (words is not None or rate is not None) and not own:
        raise AmorError("this model has no gated blocks, so there is no gate to set")
    gates = list(own)
    if words is not None:
        gates = share_decision(
            own, [parse_gate(words, gate, index) for index, gate in enumerate(own)]
        )
    return gates if rate is None else all_aimed(gates, rate)


def parse_gate(words: str, own: Gate, index: int) -> Gate:
    """The gate that `kind` or `random:rate` means for block `index`, whose own gate is `own`."""
    kind, _, value = words.partition(":")
    if kind == own.kind and not value:
        return own
    if kind not in STATELESS:
        raise AmorError(
            f"--gate {words}: this model's own gate is {own.kind!r}; besides it, "
            f"{nearest(kind, STATELESS)}"
        )
    if value and kind != "random":
        raise AmorError(
            f"--gate {words}: {kind!r} takes no number; only random does, e.g. random:0.3"
        )
    cls = find_gate(kind)
    try:
        rate = {"rate": float(value)} if value else {}
    except ValueError:
        raise AmorError(
            f"--gate {words}: {value!r} is not a number; write for instance random:0.3"
        ) from None
    options: Any = typed.convert(cls.Options, rate, f"--gate {words}")
    return cls(0, options, index)  # a stateless gate has no weights, so no width


def all_aimed(gates: Sequence[Gate], rate: float) -> list[Gate]:
    """Copies of the gates of all blocks that fire on about this fraction of tokens."""
    return share_decision(gates, [aimed(gate, rate) for gate in gates])


def aimed(gate: Gate, rate: float) -> Gate:
    """A copy of a gate that fires on about this fraction of tokens."""
    other = copy.deepcopy(gate)
    other.aim(rate)
    return other
