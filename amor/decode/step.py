"""One decode step by compiled programs: the same numbers as the model's forward with T = 1, at the speed of memory.

Layers that follow each other and state their programs are one call of native code (a stretch); a layer that cannot be compiled
runs its own forward between two stretches. So do the blocks, all together, where one of them cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.decode.blocks import Blocks, Chain
from amor.decode.compile import SOURCE, Compiled
from amor.errors import AmorError
from amor.form import Part
from amor.kv import KV
from amor.layout import Layout
from amor.models.amor import Amor
from amor.models.backbone import Layer
from amor.ops import native
from amor.ops.product import Matrix, pack
from amor.ops.product.pages import use_huge_pages
from amor.parts import RMSNorm, touched
from amor.program import Program, UnsaidError, plainly
from amor.state import State


def _say_norms(p: Program, norms: Sequence[RMSNorm | None]) -> None:
    """What columns read of the residual, the first memory of a program: a column that reads it as it is has no norm."""
    for norm, out in zip(norms, p.given[1:], strict=True):
        if norm is not None:
            p.norm(p.given[0], norm, out=out)


def uncompiled(model: Amor) -> str:
    """Why no step of a model can be compiled here, or nothing."""
    weight = model.embed.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"compiled steps are for float32 on cpu, the model is {weight.dtype} on {weight.device.type}"
    return native.missing(SOURCE) or ""


@dataclass(frozen=True)
class Stretch:
    """Layers that run as one: compiled, or one layer by its own forward, and why."""

    first: int
    layers: list[Layer]
    compiled: Compiled | None = None
    why: str = ""
    normed: bool = False  # norm_f is among its instructions
    columns: int = 0  # then what is read of the residual, so many columns

    def __call__(self, h: Tensor, parts: list[Part], layout: Layout, read: Sequence[Tensor]) -> Tensor:
        """h [R, D] through the layers; `parts`, of all layers, become what they are after the token, `read` what is read of h."""
        if self.compiled is not None:
            self.compiled([h, *read], parts, layout)
            return h
        (layer,) = self.layers
        moved, parts[self.first] = layer(h[:, None], parts[self.first], layout)
        return moved[:, 0].contiguous()


class CompiledModel:
    """A model whose steps are compiled as far as its layers allow."""

    def __init__(self, model: Amor, weights: str = "float32"):
        why = uncompiled(model)
        if why:
            raise AmorError(f"steps cannot be compiled: {why}; the model's own forward decodes without that")
        self.model, self.weights = model, weights
        self._packed: dict[int, Matrix] = {}  # of a weight by identity: several programs may read one
        self.blocks, self.blocks_why = self._blocks()
        self.stretches = self._stretches()
        use_huge_pages(t for m in self.matrices() for t in (m.weight, m.scales) if t is not None)

    def pack(self, weight: Tensor) -> Matrix:
        if id(weight) not in self._packed:
            self._packed[id(weight)] = pack(weight, self.weights)
        return self._packed[id(weight)]

    def _stretches(self) -> list[Stretch]:
        said: list[tuple[int, Layer, str]] = []
        for index, layer in enumerate(self.model.backbone.layers):
            assert isinstance(layer, Layer)
            said.append((index, layer, self._unsaid(layer, index)))
        found: list[Stretch] = []
        waiting: list[Layer] = []
        for index, layer, why in said:
            if not why:
                waiting.append(layer)
            if waiting and (why or index == len(said) - 1):
                found.append(self._compile(index + (not why) - len(waiting), waiting, index == len(said) - 1 and not why))
                waiting = []
            if why:
                found.append(Stretch(index, [layer], None, why))
        return found

    def _unsaid(self, layer: Layer, index: int) -> str:
        if touched(layer) or touched(self.model.backbone):
            return touched(layer) or touched(self.model.backbone)
        try:
            layer.program(Program(self.model.config.width), Program(self.model.config.width).given[0])
        except UnsaidError as why:
            return str(why)
        return ""

    def _compile(self, first: int, layers: list[Layer], last: bool) -> Stretch:
        ends = last and self.blocks is not None and self.blocks.norm_f is not None
        norms = self.blocks.norms if ends and self.blocks is not None and self.model.blocks else []
        program = Program(*[self.model.config.width] * (1 + len(norms)))
        for index, layer in enumerate(layers):
            program.layer(first + index)
            layer.program(program, program.given[0])
        if ends:  # the norms behind the layers need no call of their own
            program.norm(program.given[0], self.model.norm_f, out=program.given[0])
            _say_norms(program, norms)
        return Stretch(first, list(layers), Compiled(program, self.pack), normed=ends, columns=len(norms))

    def _blocks(self) -> tuple[Blocks | None, str]:
        model, width = self.model, self.model.config.width
        blocks = model.each_block()
        prenorm = model.config.blocks.first == "prenorm" and bool(blocks)
        try:
            for block in blocks:
                for part in block.modules():
                    if touched(part) and part is not block.gate:
                        raise UnsaidError(touched(part))
            norm_f = None
            plainly(model.norm_f)
            if not prenorm:
                p = Program(width)
                p.norm(p.given[0], model.norm_f, out=p.given[0])
                norm_f = Compiled(p, self.pack)
            norms = [*(block.norm or (model.norm_f if prenorm else None) for block in blocks), model.final_norm]
            inputs = []
            for first in range(len(norms)):
                p = Program(width, *([width] * (len(norms) - first)))
                _say_norms(p, norms[first:])
                inputs.append(Compiled(p, self.pack))
            closed, ends = Program(*[width] * (2 + len(blocks))), []
            for index, norm in enumerate(norms):
                x = closed.given[0] if norm is None else closed.norm(closed.given[0], norm, out=closed.given[1 + index])
                if index < len(blocks):
                    closed.layer(index)
                    blocks[index].keys_program(closed, x)
                ends.append(len(closed.steps))
            chain = Chain.of(blocks, norms[-1], model.config, self.pack)
        except UnsaidError as why:
            return None, str(why)
        return Blocks(norms, norm_f, inputs, Compiled(closed, self.pack), [0, *ends], chain), ""

    @property
    def path(self) -> str:
        """Which parts are compiled, and why others are not."""
        apart = [f"layer {s.first} by its own forward ({s.why})" for s in self.stretches if s.compiled is None]
        if self.blocks is None:
            apart.append(f"what follows the layers by the model's forward ({self.blocks_why})")
        return ", ".join(["compiled steps", *apart])

    @property
    def whole(self) -> bool:
        return self.blocks is not None and all(s.compiled is not None for s in self.stretches)

    def matrices(self) -> list[Matrix]:
        """Every matrix of layers and blocks."""
        return list(self._packed.values())

    @property
    def nbytes(self) -> int:
        """Bytes of matrices one step reads without the head; every block as if it fired."""
        return sum(m.nbytes for m in self.matrices())

    def through_layers(self, tokens: Tensor, state: State, layout: Layout) -> tuple[Tensor, list[Part], Tensor | None]:
        """The residual [R, D] behind the layers (and norm_f, where blocks are compiled), their parts of the state after it, and
        what blocks and the output read of it [columns, R, D], where that was found on the way.

        Recurrent tensors of the state are written over, unless it remembers tokens for rollback.
        """
        depth = len(self.model.backbone.layers)
        parts = [
            {name: self._mine(held, layout, bool(state.memory)) for name, held in part.items()} if self._writes(layer) else part
            for layer, part in enumerate(state.parts[:depth])
        ]
        h = self.model.embed(tokens).contiguous()
        read = None
        for stretch in self.stretches:
            read = torch.empty(stretch.columns, *h.shape) if stretch.columns else None
            h = stretch(h, parts, layout, () if read is None else list(read))
        if self.blocks is not None and self.blocks.norm_f is not None and not self.stretches[-1].normed:
            self.blocks.norm_f([h])
        return h, parts, read

    def _writes(self, layer: int) -> bool:
        """Whether compiled code writes a layer's part of the state; a layer's own forward gives a new one."""
        return any(s.compiled is not None and s.first <= layer < s.first + len(s.layers) for s in self.stretches)

    def _mine(self, held: Tensor | KV, layout: Layout, keep: bool) -> Tensor | KV:
        """What compiled code may write to: keys and values with a free slot, a recurrent tensor or (keep) a copy of it."""
        if isinstance(held, KV):
            return held.with_open_slots(layout)
        dense = held.float().contiguous()
        return dense.clone() if keep and dense is held else dense

    @property
    def overwrites(self) -> bool:
        return any(not held.theta for s in self.stretches if s.compiled is not None for held in s.compiled.held)
