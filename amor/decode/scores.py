"""Compiled scores of gates that read nothing but their block's input."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from amor.decode.compile import Compiled
from amor.gates.base import Gate, matches_forward
from amor.ops.product import pack
from amor.parts import touched
from amor.program import NoProgramError, Program, Vector


class Scorers:
    """The compiled program of each gate, compiled again when a number of the gate changes."""

    def __init__(self) -> None:
        self.compiled: WeakKeyDictionary[Gate, tuple[tuple[object, ...], Compiled | None]] = (
            WeakKeyDictionary()
        )

    def __call__(self, gate: Gate, width: int) -> Compiled | None:
        """Called with x [R, width], the result writes scores to [R, 1].

        None for a gate that states no program, and so decides by its forward.
        """
        if not states_program(gate):
            return None
        version, known = gate.version_key(), self.compiled.get(gate)
        if known is None or known[0] != version:
            self.compiled[gate] = known = version, _compile(gate, width)
        return known[1]


def _compile(gate: Gate, width: int) -> Compiled | None:
    p = Program(width, 1)
    try:
        record_score(gate, p, *p.inputs)
    except NoProgramError:
        return None
    return Compiled(p, pack)


def states_program(gate: Gate) -> bool:
    """Whether its program describes its own forward, and nobody watches that."""
    return matches_forward(type(gate), "program") and not touched(gate)


def record_score(gate: Gate, p: Program, x: Vector, score: Vector) -> None:
    """Record how the score of a gate is computed; NoProgramError where it cannot be."""
    if not states_program(gate):
        raise NoProgramError(touched(gate) or f"gate {gate.kind!r} states no program")
    gate.program(p, x, score)
