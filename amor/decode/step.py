"""One decode step in native code: the same numbers as the model's forward with T = 1.

Consecutive layers that state their programs are one native call (a segment); a layer that cannot be
compiled runs its own forward between two segments. So do all blocks together, if one cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from amor.decode.blocks import BlockPrograms, record_columns
from amor.decode.compile import SOURCE, Compiled
from amor.decode.head import Head
from amor.decode.record import StepProgram
from amor.decode.tables import RowTables, StateEntries
from amor.errors import AmorError
from amor.form import Part
from amor.gates.base import Gate
from amor.kv import KV
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.backbone import Layer
from amor.ops import native
from amor.ops.product import Matrix, pack
from amor.ops.product.pages import use_huge_pages
from amor.parts import touched
from amor.program import NoProgramError, Program
from amor.state import State


def why_not_compilable(model: Amor) -> str:
    """Why no step of a model can be compiled on this machine, or an empty string."""
    weight = model.embed.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        where = f"{weight.dtype} on {weight.device.type}"
        return f"compiled steps are for float32 on cpu, the model is {where}"
    return native.missing(SOURCE) or ""


@dataclass(frozen=True)
class LayerSegment:
    """Consecutive layers compiled as one program, or one layer that runs its own forward."""

    first: int  # index of its first layer
    layers: list[Layer]
    compiled: Compiled | None = None
    why: str = ""  # not compiled
    ends_with_norm: bool = False  # the one before the blocks
    num_columns: int = 0  # columns of the blocks that it computes behind that norm

    def __call__(
        self,
        h: Tensor,
        parts: list[StateEntries] | RowTables,
        layout: Layout,
        columns: Sequence[Tensor],
    ) -> Tensor:
        """h [R, D] through the layers; updates `parts` (of all layers) and fills in `columns`."""
        if self.compiled is not None:
            self.compiled([h, *columns], parts, layout)
            return h
        (layer,) = self.layers
        assert not isinstance(parts, RowTables)  # rows have memory of their own if all is compiled
        after, parts[self.first] = layer(h[:, None], cast(Part, parts[self.first]), layout)
        return after[:, 0].contiguous()


class CompiledModel:
    """A model whose steps are compiled as far as its layers allow."""

    def __init__(self, model: Amor, weights: str = "float32"):
        why = why_not_compilable(model)
        if why:
            raise AmorError(
                f"steps cannot be compiled: {why}; the model's own forward decodes without that"
            )
        self.model, self.weights = model, weights
        self._packed: dict[int, Matrix] = {}  # by id of the weight: several programs may share one
        self.blocks, self.blocks_why = self._blocks()
        self.segments = self._segments()
        use_huge_pages(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)

    def pack(self, weight: Tensor) -> Matrix:
        """The weight in the engine's format, packed once."""
        if id(weight) not in self._packed:
            self._packed[id(weight)] = pack(weight, self.weights)
        return self._packed[id(weight)]

    def _segments(self) -> list[LayerSegment]:
        layers = list(self.model.backbone.layers)
        segments: list[LayerSegment] = []
        pending: list[Layer] = []
        for index, layer in enumerate(layers):
            assert isinstance(layer, Layer)
            why, last = self._why_not(layer), index == len(layers) - 1
            if not why:
                pending.append(layer)
            if pending and (why or last):
                first = index + (not why) - len(pending)
                segments.append(self._compile(first, pending, last and not why))
                pending = []
            if why:
                segments.append(LayerSegment(index, [layer], None, why))
        return segments

    def _why_not(self, layer: Layer) -> str:
        """Why a layer cannot be compiled, or an empty string."""
        if touched(layer) or touched(self.model.backbone):
            return touched(layer) or touched(self.model.backbone)
        p = Program(self.model.config.width)
        try:
            layer.program(p, p.inputs[0])
        except NoProgramError as why:
            return str(why)
        return ""

    def _compile(self, first: int, layers: list[Layer], last: bool) -> LayerSegment:
        blocks = self.blocks if last else None
        norm = None if blocks is None else blocks.norms.before
        columns = len(self.model.blocks) + 1 if norm is not None and self.model.blocks else 0
        program = Program(*[self.model.config.width] * (1 + columns))
        h = program.inputs[0]
        for index, layer in enumerate(layers):
            program.layer(first + index)
            layer.program(program, h)
        if blocks is not None and norm is not None:  # norms need no call of their own
            program.norm(h, norm, out=h)
            if columns:
                record_columns(program, blocks.norms)
        compiled = Compiled(program, self.pack)
        return LayerSegment(first, list(layers), compiled, "", norm is not None, columns)

    def _blocks(self) -> tuple[BlockPrograms | None, str]:
        try:
            return BlockPrograms.of(self.model, self.pack), ""
        except NoProgramError as why:
            return None, str(why)

    @property
    def path(self) -> str:
        """Which parts are compiled, and why others are not."""
        apart = [
            f"layer {s.first} by its own forward ({s.why})"
            for s in self.segments
            if s.compiled is None
        ]
        if self.blocks is None:
            apart.append(f"what follows the layers by the model's forward ({self.blocks_why})")
        return ", ".join(["compiled steps", *apart])

    @property
    def whole(self) -> bool:
        """Whether all layers and blocks are compiled."""
        return self.blocks is not None and all(s.compiled is not None for s in self.segments)

    def matrices(self) -> list[Matrix]:
        """Every matrix of layers and blocks."""
        return list(self._packed.values())

    @property
    def nbytes(self) -> int:
        """Bytes of matrices one step reads without the head; every block as if it fired."""
        return sum(m.nbytes for m in self.matrices())

    def through_layers(
        self, tokens: Tensor, parts: list[StateEntries] | RowTables, layout: Layout
    ) -> tuple[Tensor, Tensor | None]:
        """One token per row through the layers.

        Returns the residual [R, D] behind them (before block 0, if the blocks are compiled) and the
        columns [K + 1, R, D] where the last segment computed them. Recurrent tensors of `parts`
        are overwritten, or replaced where a layer runs its own forward.
        """
        h = self.model.embed(tokens).contiguous()
        columns = None
        for segment in self.segments:
            columns = torch.empty(segment.num_columns, *h.shape) if segment.num_columns else None
            h = segment(h, parts, layout, () if columns is None else list(columns))
        norm = None if self.blocks is None else self.blocks.enter
        if norm is not None and not self.segments[-1].ends_with_norm:
            norm([h])
        return h, columns

    def writable(self, state: State, layout: Layout) -> list[StateEntries]:
        """Parts of a State that a step may write: recurrent tensors, and keys with a free slot."""
        keep, depth = bool(state.memory), len(self.model.backbone.layers)
        return [
            {name: self._writable(t, layout, keep) for name, t in state.parts[index].items()}
            if self._writes(index) or (index >= depth and self.blocks is not None)
            else state.parts[index]
            for index in range(len(state.parts))
        ]

    def record(self, gates: Sequence[Gate], head: Head) -> tuple[StepProgram | None, str]:
        """The whole step behind these gates as one program, or None and why not."""
        try:
            return StepProgram.of(self.model, gates, head, self.pack), ""
        except NoProgramError as why:
            return None, str(why)

    def _writes(self, layer: int) -> bool:
        """Whether compiled code writes a layer's part; a layer's own forward returns a new one."""
        return any(
            s.compiled is not None and s.first <= layer < s.first + len(s.layers)
            for s in self.segments
        )

    def _writable(self, tensor: Tensor | KV, layout: Layout, keep: bool) -> Tensor | KV:
        """Keys and values with a free slot; a recurrent tensor, or (keep) a copy of it."""
        if isinstance(tensor, KV):
            return tensor.with_open_slots(layout)
        dense = tensor.float().contiguous()
        return dense.clone() if keep and dense is tensor else dense

    @property
    def overwrites(self) -> bool:
        """Whether a step overwrites recurrent tensors of the State."""
        return any(
            not ref.theta
            for s in self.segments
            if s.compiled is not None
            for ref in s.compiled.state_refs
        )
