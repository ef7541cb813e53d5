"""Gates that look at nothing but what their block reads: their scores, compiled from the programs they state."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from amor.decode.compile import Compiled
from amor.gates.base import Gate, matches_forward
from amor.ops.product import pack
from amor.parts import touched
from amor.program import Program, UnsaidError


class Scorers:
    """What was compiled of each gate, as long as its numbers stand."""

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[Gate, tuple[tuple[object, ...], Compiled | None]] = WeakKeyDictionary()

    def __call__(self, gate: Gate, width: int) -> Compiled | None:
        """It is called with x [R, width] and writes the scores to [R, 1]; None for a gate that has to be asked by its forward."""
        if not matches_forward(type(gate), "program") or touched(gate):
            return None
        now, known = gate.version_key(), self.known.get(gate)
        if known is None or known[0] != now:
            self.known[gate] = known = now, _compiled(gate, width)
        return known[1]


def _compiled(gate: Gate, width: int) -> Compiled | None:
    p = Program(width, 1)
    try:
        gate.program(p, *p.given)
    except UnsaidError:
        return None
    return Compiled(p, pack)
