"""Our models in vLLM's engine: embedding, layers, gated blocks and head on the flat tokens of a
step, whichever requests they belong to.

Gated blocks run for all tokens of a step and are masked: the same numbers as our engine's, and no
attention is saved (docs/how-to/vllm.md explains what that means).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFunc,
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    SupportsMambaPrefixCaching,
)

from amor.config import Config
from amor.models.gated import Norms, gated_pass, has_final_norm
from amor.vllm.block import VllmBlock, VllmBlocks
from amor.vllm.layers import VllmLayer
from amor.vllm.own import fresh_state
from amor.vllm.served import own_kind, scans
from amor.vllm.stats import Ledger
from amor.vllm.weights import load


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class Skeleton(nn.Module):
    """Everything up to the vector that the head reads."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: Config = vllm_config.model_config.hf_config.built
        self.embed = VocabParallelEmbedding(config.vocab, config.width, prefix="embed")
        head = ParallelLMHead(config.vocab, config.width, prefix="head")
        self.head = head.tie_weights(self.embed) if config.tied else head
        self.layers = nn.ModuleList(
            VllmLayer(config, kind, vllm_config, f"layers.{i}")
            for i, kind in enumerate(config.pattern)
        )
        self.norm_f = RMSNorm(config.width, config.eps("norm_f"))
        self.blocks = nn.ModuleList()
        for k in range(config.blocks.count):
            first = self.each_block()[0].decider.gate if k else None
            name = f"layers.{len(self.layers) + k}"
            self.blocks.append(VllmBlock(config, k, first, self.head, vllm_config, name))
        normed = has_final_norm(config.blocks)
        self.final_norm = RMSNorm(config.width, config.eps("final_norm")) if normed else None
        # a plain object, made here so that torch.compile does not trace how
        inputs = [block.norm for block in self.each_block()]
        self.norms = Norms.of(config.blocks, self.norm_f, inputs, self.final_norm)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        h = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            h = layer(h, positions)
        each = self.each_block()
        blocks = VllmBlocks(self.norms, each, positions)
        return gated_pass(h, blocks, [block.decider.gate for block in each], blocks)[0]

    def each_block(self) -> list[VllmBlock]:
        """The gated blocks, typed."""
        return list(self.blocks)  # type: ignore[arg-type]


class VllmAmorForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """One class for every architecture of ours; amor/vllm/__init__.py registers it by its name.

    vLLM reads from the config's layer_types whether there are recurrent states and pages of keys.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.model = Skeleton(vllm_config=vllm_config, prefix=prefix)
        self.logits_processor = LogitsProcessor(self.config.built.vocab)
        self.ledger = Ledger(vllm_config, [block.decider for block in self.model.each_block()])

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        # here, because it is called every step and is never compiled nor captured
        self.ledger.publish()
        return self.logits_processor(self.model.head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {f"model.{name}" for name in load(self.model, self.config.built, weights)}

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        cache = vllm_config.cache_config
        if scans(vllm_config.model_config.hf_config.built) is None:
            return tuple(state.dtype for state in cls._own_state(vllm_config))
        return MambaStateDtypeCalculator.mamba2_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        config: Config = vllm_config.model_config.hf_config.built
        scan = scans(config)
        if scan is None:
            return tuple(tuple(state.shape[1:]) for state in cls._own_state(vllm_config))
        inner = scan.expand * config.width
        return MambaStateShapeCalculator.mamba2_state_shape(
            tp_world_size=vllm_config.parallel_config.tensor_parallel_size,
            intermediate_size=inner,
            n_groups=scan.groups,
            num_heads=inner // scan.head_size,
            head_dim=scan.head_size,
            state_size=scan.state_size,
            conv_kernel=scan.conv,
            num_spec=vllm_config.num_speculative_tokens,
        )

    @classmethod
    def _own_state(cls, vllm_config: VllmConfig) -> tuple[Tensor, ...]:
        config: Config = vllm_config.model_config.hf_config.built
        kind = own_kind(config)
        assert kind is not None, "called only for models with recurrent layers"
        state = fresh_state(config, kind, vllm_config.model_config.dtype)
        return tuple(state.values())  # type: ignore[arg-type]

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()
