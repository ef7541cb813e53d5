"""The gated pass: the only file that knows what happens around the gated blocks, in which order.

Training, prefill, evaluation, decode and the vLLM plug-in all run `gated_pass`. What differs is
handed in: how blocks compute (`GatedBlocks`), where decisions get their evidence
(`EvidenceSource`), and who looks on (`Observer`). The config's words about the pass (blocks.first,
blocks.final, blocks.probe, blocks.decide) are read here and nowhere else:

* first: "plain" norms the backbone's output before the blocks; "prenorm" leaves the residual as it
  is, and the same norm (norm_f) stands before block 0 only.
* final: a norm behind the blocks, or none.
* probe: gates read the head for their block's input, or for the output vector as it would be if no
  further block fired ("final").
* decide: every block has a gate, or the one of block 0 decides for all ("once").

Column k < K is the input of block k, column K is the vector the head reads in the end.
docs/explanations/gated-pass.md explains the pass with a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor

from amor.config import Blocks as BlocksConfig
from amor.config import Config
from amor.gates.base import Gate, find_gate
from amor.gates.follower import Follower

if TYPE_CHECKING:
    from amor.models.block import TorchBlocks

Norm = TypeVar("Norm", bound=Callable[..., Any])


@dataclass(frozen=True)
class Norms(Generic[Norm]):
    """The norms around K blocks; None: the vector is taken as it is."""

    before: Norm | None  # of the backbone's output; its result is the residual
    columns: tuple[Norm | None, ...]  # [K + 1] from the residual to each column
    probe_output: bool  # gates read the head for the last column instead of their block's input

    @classmethod
    def of(
        cls, config: BlocksConfig, norm_f: Norm, inputs: Sequence[Norm | None], final: Norm | None
    ) -> Norms[Norm]:
        """norm_f: behind the backbone; inputs: of each block; final: behind the blocks."""
        prenorm = config.first == "prenorm" and config.count > 0
        first = norm_f if prenorm else None
        columns = (*(first if norm is None else norm for norm in inputs), final)
        return cls(None if prenorm else norm_f, columns, config.probe == "final")

    def enter(self, h: Any) -> Any:
        """The residual before block 0, from the backbone's output."""
        return h if self.before is None else self.before(h)

    def column(self, index: int, h: Any) -> Any:
        """A column of the residual h: the input of a block, or (index K) the output vector."""
        norm = self.columns[index]
        return h if norm is None else norm(h)

    def output(self, h: Any) -> Any:
        """The vector the head reads behind the blocks, from the residual h."""
        return self.column(len(self.columns) - 1, h)

    def probe(self, h: Any, x: Any) -> Any:
        """The vector the head reads for a gate, from the residual h and its block's input x."""
        return self.output(h) if self.probe_output else x


def has_final_norm(config: BlocksConfig) -> bool:
    """Whether a norm stands behind the blocks."""
    return config.count > 0 and config.final == "norm"


def gate_of(config: Config, index: int, first: Gate | None) -> Gate:
    """The gate of block `index`; first: that of block 0, None for itself."""
    if first is not None and config.blocks.decide == "once":
        return Follower(first)
    return find_gate(config.blocks.gate)(config.width, config.gate_options(), index)


class GatedBlocks(Protocol):
    """How the blocks of one pass compute. A residual h is whatever an implementation makes of it:
    [B, T, D] in torch, [R, D] with its columns in compiled decode, [N, D] in vLLM."""

    def enter(self, h: Any) -> Any:
        """The residual before block 0, from the backbone's output."""

    def input(self, index: int, h: Any) -> Any:
        """The input x of block `index`."""

    def write(self, index: int, h: Any, x: Any) -> None:
        """Keep key and value of every token; attention of later tokens needs them."""

    def queries(self, index: int, h: Any, x: Any, before: Any) -> tuple[Any, Any, Any]:
        """h, x and the decision of the block before, of the tokens whose queries may run."""

    def apply(self, index: int, h: Any, x: Any, decision: Any) -> Any:
        """The residual after block `index`: attention where it fires, elsewhere unchanged."""

    def output(self, h: Any) -> Any:
        """The vector the head reads, from the residual behind the last block."""


class EvidenceSource(Protocol):
    """Where gates get their evidence. No source may return a number that changes a decision."""

    def decide(self, index: int, gate: Gate, h: Any, x: Any, before: Any) -> Any:
        """The decision of the gate of block `index`; before: that of the previous block."""


# (index, h, x) of every block after its keys are written and before its gate decides
Observer = Callable[[int, Any, Any], None]


def gated_pass(
    h: Any,
    blocks: GatedBlocks,
    gates: Sequence[Gate],
    evidence: EvidenceSource,
    observers: Sequence[Observer] = (),
) -> tuple[Any, list[Any]]:
    """The backbone's output h through the blocks: the head's input, and one decision per block."""
    h = blocks.enter(h)
    decision, decisions = None, []
    for index, gate in enumerate(gates):
        x = blocks.input(index, h)
        blocks.write(index, h, x)
        for observe in observers:
            observe(index, h, x)
        h, x, decision = blocks.queries(index, h, x, decision)
        decision = evidence.decide(index, gate, h, x, decision)
        h = blocks.apply(index, h, x, decision)
        decisions.append(decision)
    return blocks.output(h), decisions


@dataclass(frozen=True)
class PassOptions:
    """How one forward differs from plain use: handed in by analysis code, decode and the trainer.

    The defaults are plain use.
    """

    gates: Sequence[Gate] | None = None  # one per block; None: the model's own
    # which queries are computed, one of amor.models.block.COMPUTE; "auto" takes the faster
    compute: str = "auto"
    # `Output.residual` of an earlier call with the same tokens; skips the backbone, whose part of
    # the state then stays as it is
    residual: Tensor | None = None
    # [B, S] columns where gains are measured for gates that learn them; needs targets
    measure: Tensor | None = None
    # makes the source of evidence from the blocks of the call and its targets [B, T]; None: one
    # reading of the head per block
    evidence: Callable[[TorchBlocks, Tensor | None], EvidenceSource] | None = None
