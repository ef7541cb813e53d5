"""The gated block on the flat tokens of a step: attention of all, kept where the gate fires."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from amor.config import Config
from amor.gates.base import Gate
from amor.mixers.attention import AttentionOptions
from amor.models.block import floored_sigmoid
from amor.models.gated import Norms, gate_of
from amor.vllm.gate import Decider
from amor.vllm.layers import VllmAttention, VllmSwiGLU


class VllmBlock(nn.Module):
    """One gated block, as amor/models/block.py."""

    def __init__(
        self,
        config: Config,
        index: int,
        first: Gate | None,  # of block 0; None for that block itself
        head: VocabParallelEmbedding,
        vllm: VllmConfig,
        prefix: str,
    ):
        super().__init__()
        blocks, width, eps = config.blocks, config.width, config.eps("block")
        self.norm = RMSNorm(width, eps) if index else None
        options = AttentionOptions(blocks.head_size, blocks.rope_theta)
        self.attention = VllmAttention(width, options, vllm, f"{prefix}.attention")
        self.alpha, self.alpha_floor = nn.Parameter(torch.zeros(width)), blocks.alpha_floor
        gate, pages = gate_of(config, index, first), f"{prefix}.attention.attn"
        self.decider = Decider(gate, head, vllm, f"{prefix}.gate", pages)
        self.mlp_norm = RMSNorm(width, eps) if blocks.mlp else None
        self.mlp = VllmSwiGLU(width, config.d_ff, vllm, f"{prefix}.mlp") if blocks.mlp else None

    def forward(self, h: Tensor, x: Tensor, positions: Tensor, fire: Tensor) -> Tensor:
        """The residual [N, D] after the block, from h and its input x; fire: [N] where it fires."""
        opened = h + floored_sigmoid(self.alpha, self.alpha_floor) * self.attention(x, positions)
        if self.mlp is not None and self.mlp_norm is not None:
            opened = opened + self.mlp(self.mlp_norm(opened))
        return torch.where(fire[:, None], opened, h)


class VllmBlocks:
    """The blocks of one step for amor/models/gated.py, and where their gates get evidence.

    A decision is where a block fires, [N].
    """

    def __init__(self, norms: Norms[RMSNorm], blocks: Sequence[VllmBlock], positions: Tensor):
        self.norms, self.blocks, self.positions = norms, blocks, positions

    def enter(self, h: Tensor) -> Tensor:
        return self.norms.enter(h)

    def input(self, index: int, h: Tensor) -> Tensor:
        return self.norms.column(index, h)

    def write(self, index: int, h: Tensor, x: Tensor) -> None:
        """vLLM's attention writes keys and values itself, of all tokens."""

    def queries(
        self, index: int, h: Tensor, x: Tensor, before: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return h, x, before

    def decide(self, index: int, gate: Gate, h: Tensor, x: Tensor, before: Tensor | None) -> Tensor:
        return self.blocks[index].decider(self.norms.probe(h, x), x, self.positions, before)

    def apply(self, index: int, h: Tensor, x: Tensor, fire: Tensor) -> Tensor:
        return self.blocks[index](h, x, self.positions, fire)

    def output(self, h: Tensor) -> Tensor:
        return self.norms.output(h)
