"""A whole decode step as one program: the layers, then the gated pass, recorded by running it.

`gated_pass` runs over places in memory instead of numbers: blocks record norms, keys and the body
of a firing, gates record their scores. The decision of a gate that looks at positions alone is made
before the step and given to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from amor.decode.compile import Compiled, Pack
from amor.decode.evidence import most_vectors
from amor.decode.head import Head
from amor.decode.scores import record_score, states_program
from amor.decode.step_output import StepOutput
from amor.decode.tables import StateEntries
from amor.gates.base import Adaptive, Evidence, Gate
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.gated import gated_pass
from amor.ops.spent import someone_counts, spend
from amor.parts import Linear
from amor.program import STATISTICS, HeadOp, NoProgramError, Program, Vector


class RecordedPass:
    """Blocks and evidence of the gated pass as instructions; a decision is its block's index."""

    def __init__(self, p: Program, model: Amor, gates: Sequence[Gate]):
        """p: inputs are the residual, K + 1 columns, then [K + 1] scores, thresholds, given
        decisions and fires."""
        self.p, self.norms, self.gates = p, model.norms, gates
        self.blocks, self.last = model.each_block(), len(gates)
        self.layers, self.vocab = len(model.backbone.layers), model.config.vocab
        self.columns = p.inputs[1 : self.last + 2]
        self.scores, self.thresholds, self.given, self.fires = (
            v.split(*[1] * v.width) for v in p.inputs[self.last + 2 :]
        )
        with torch.device("meta"):
            self.head = Linear(1, 1)
        weight = model.head_weight
        self.head.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)

    def enter(self, h: Vector) -> Vector:
        return h if self.norms.before is None else self.p.norm(h, self.norms.before, out=h)

    def input(self, index: int, h: Vector) -> Vector:
        norm = self.norms.columns[index]
        return h if norm is None else self.p.norm(h, norm, out=self.columns[index])

    def write(self, index: int, h: Vector, x: Vector) -> None:
        self.p.layer(self.layers + index)
        self.blocks[index].keys_program(self.p, x)

    def queries(
        self, index: int, h: Vector, x: Vector, before: int | None
    ) -> tuple[Vector, Vector, int | None]:
        return h, x, before

    def decide(self, index: int, gate: Gate, h: Vector, x: Vector, before: int | None) -> int:
        if gate.decider is not gate and before is not None:
            return before
        if not gate.by_position and not isinstance(gate, Adaptive):
            raise NoProgramError(f"gate {gate.kind!r} compares no score with a threshold")
        if not gate.by_position or states_program(gate):
            self.p.read_head = lambda *read: self.read(index, h, *read)
            record_score(gate, self.p, x, self.scores[index])
        return index

    def read(
        self, column: int, h: Vector, name: str, out: Vector, shift: float, sign: float
    ) -> None:
        """A statistic of the head for a column of the residual; later ones are read with it."""
        columns = [k for k in range(column, self.last) if self.gates[k].needs] + [self.last]
        if self.norms.probe_output:
            columns = [self.last]
        norms = [self.norms.columns[k] for k in columns]
        weights = [h.width * [0.0] if n is None else n.weight.detach().float() for n in norms]
        self.p.instructions.append(
            HeadOp(
                *(h, out, columns[0], self.last, STATISTICS.index(name), len(columns)),
                *(
                    shift,
                    sign * (math.log(self.vocab) if name == "entropy" else 1.0),
                    most_vectors(len(columns)),
                    torch.tensor(columns).float(),
                ),
                torch.stack([torch.as_tensor(w) for w in weights]),
                torch.tensor([-1.0 if n is None else n.eps for n in norms]),
                (self.head,),
            )
        )

    def apply(self, index: int, h: Vector, x: Vector, decision: int) -> Vector:
        body = Program(h.width, h.width, h.width)
        body.layer(self.layers + index)
        self.blocks[index].program(body, *body.inputs)
        numbers = (each[decision] for each in (self.scores, self.thresholds, self.given))
        self.p.fire(body, h, x, *numbers, self.fires[index])
        return h

    def output(self, h: Vector) -> Vector:
        self.read(self.last, h, "entropy", self.scores[self.last], 0.0, 1.0)
        return h


@dataclass(frozen=True)
class StepProgram:
    """One native call per decode step, for any number of rows."""

    compiled: Compiled
    gates: Sequence[Gate]  # as they were when it was recorded: `Gate.version_key`
    head: Head
    leaders: list[int]  # of each block, the block whose gate decides for it
    # [4, K + 1] scores, thresholds, given decisions (NaN: none) and fires before a step
    numbers: Tensor

    @classmethod
    def of(cls, model: Amor, gates: Sequence[Gate], head: Head, pack: Pack) -> StepProgram:
        """Record and compile it; NoProgramError where a layer, a block or a gate has no program."""
        count, width = len(gates), model.config.width
        p = Program(*[width] * (count + 2), *[count + 1] * 4)
        h = p.inputs[0]
        for index, layer in enumerate(model.backbone.layers):
            p.layer(index)
            layer.program(p, h)  # type: ignore[operator]
        recorded = RecordedPass(p, model, gates)
        gated_pass(h, recorded, gates, recorded)
        weight = recorded.head.weight
        compiled = Compiled(p, lambda w: head.matrix if w is weight else pack(w))
        numbers = torch.zeros(4, count + 1)
        numbers[2] = torch.nan
        for index, gate in enumerate(gates):
            if isinstance(gate, Adaptive) and not gate.by_position:
                numbers[1, index] = gate.threshold_value()
        leaders: list[int] = []
        for index, gate in enumerate(gates):
            leaders.append(leaders[-1] if gate.decider is not gate and index else index)
        return cls(compiled, gates, head, leaders, numbers)

    def __call__(
        self, h: Tensor, parts: Sequence[StateEntries], layout: Layout, speculate: bool = False
    ) -> StepOutput:
        """h: [R, D] embeddings, overwritten; parts: of the State, with free slots for keys.

        speculate: run the blocks after one that fired ahead. Work that is then dropped is not
        counted, only passes over the head are.
        """
        rows, count, vocab = len(h), len(self.gates), self.head.matrix.outputs
        columns = torch.empty(count + 1, *h.shape)
        numbers = _repeated(self.numbers, rows).clone()
        scores, _, given, _ = numbers.unbind()
        for index, gate in enumerate(self.gates):
            if gate.by_position and states_program(gate):
                given[:, index] = torch.tensor(gate.fires([], layout.start.tolist()))
            elif gate.by_position:
                verdict = gate(Evidence(h, layout.start))
                scores[:, index], given[:, index] = verdict.score, verdict.fire
        logits, entropy = torch.empty(rows, vocab), torch.empty(rows)
        counts = torch.zeros(2, dtype=torch.long)
        fire = torch.empty(rows, count, dtype=torch.bool)
        inputs = [h, *columns.unbind(), *numbers.unbind()]
        results = logits, entropy, counts, fire
        self.compiled(inputs, parts, layout, results=results, speculate=speculate)
        passes, vectors = counts.tolist()
        self.head.passes.passes += passes
        self.head.passes.rows += vectors
        if someone_counts():
            self._spend(passes, vectors, fire, layout)
        own = self.leaders == list(range(count))
        scores = scores[:, :count] if own else scores[:, self.leaders]
        return StepOutput(fire, scores, logits, entropy)

    def _spend(self, passes: int, vectors: int, fire: Tensor, layout: Layout) -> None:
        matrix = self.head.matrix
        spend("head", 2 * vectors * matrix.outputs * matrix.inner, passes * matrix.nbytes)
        for costs, block in zip(self.compiled.body_costs, fire.T, strict=True):
            rows = block.nonzero()[:, 0]
            if len(rows):
                self.compiled.spend(costs, len(rows), layout, rows)


@lru_cache(64)
def _repeated(numbers: Tensor, rows: int) -> Tensor:
    """[4, rows, K + 1]: the same numbers for every row; only read."""
    return numbers[:, None].repeat(1, rows, 1)
