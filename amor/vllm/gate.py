"""Where a gated block fires: our own gates, asked with what the head says of this step's tokens, the same on every rank.

Tensor parallel ranks hold a part of the vocabulary each. Each reads its part in slices (amor/ops/head), never tokens x words at
once; what is gathered of a token are a few numbers (amor/ops/head/parts.py), joined in the same order on every rank.
The decision is one operator for torch.compile and CUDA graphs: nothing in it looks at a number from Python.
"""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import direct_register_custom_op

from amor.gates.base import Evidence, Gate, Verdict
from amor.ops import head as head_op
from amor.ops.head import parts


def said(x: Tensor, head: VocabParallelEmbedding, names: Set[str]) -> dict[str, Tensor]:
    """What the whole head says of x [N, D], of Evidence's names: [N] each."""
    best = 2 if "margin" in names else 0
    weight = head.weight[: head.shard_indices.num_org_elements]  # without the pads that make the parts even
    if len(weight):
        mine = parts.told(head_op.read(x, weight, entropy=True, topk=best))
    else:
        mine = parts.nothing(len(x), best, x.device)
    whole = parts.joined(tensor_model_parallel_all_gather(mine[None], 0))
    found = {"entropy": whole.entropy / math.log(head.org_vocab_size), "margin": whole.margin}  # type: ignore[operator]
    return {name: found[name] for name in names}  # type: ignore[misc]


class Decider(nn.Module):
    """The gate of one block, found by its name from inside the operator, and what it decided so far."""

    counts: Tensor

    def __init__(self, gate: Gate, head: VocabParallelEmbedding, vllm: VllmConfig, prefix: str, pages: str):
        """pages: the name under which vLLM keeps the block's keys and values."""
        super().__init__()
        self.gate = gate.float()  # statistics keep their digits whatever the weights are in
        self._head = (head,)  # in a tuple: it is not this module's own
        self.name, self.pages, self.page = prefix, pages, vllm.cache_config
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long), persistent=False)  # tokens, and those that fired
        vllm.compilation_config.static_forward_context[prefix] = self

    def forward(self, asked: Tensor, x: Tensor, positions: Tensor, before: Tensor | None) -> Tensor:
        """[N] whether it fires; `asked`: what the head is asked about, x: what the block reads, both [N, D]."""
        return torch.ops.vllm.amor_fire(asked, x, positions, before, self.name)

    @torch.no_grad()
    def decide(self, asked: Tensor, x: Tensor, positions: Tensor, before: Tensor | None) -> Tensor:
        names = self.gate.needs & {"entropy", "margin"}
        heard = said(asked, self._head[0], names) if names else {}
        led = None if before is None else Verdict(before, before.float())
        fire = self.gate(Evidence(x.float(), positions, **heard, before=led)).fire
        self._count(fire)
        return before.clone() if before is not None and fire is before else fire  # an operator may not return what it was given

    def _count(self, fire: Tensor) -> None:
        """Only tokens of requests: they have a slot, and not one of the first page, which vLLM uses for nobody."""
        context = get_forward_context()
        if context.attn_metadata is None or not isinstance(context.slot_mapping, dict) or self.pages not in context.slot_mapping:
            return  # vLLM tries how much memory a step takes
        real = context.slot_mapping[self.pages][: len(fire)] >= self.page.block_size
        self.counts += torch.stack([real.sum(), (real & fire[: len(real)]).sum()])


def _fire(asked: Tensor, x: Tensor, positions: Tensor, before: Tensor | None, name: str) -> Tensor:
    decider: Decider = get_forward_context().no_compile_layers[name]
    return decider.decide(asked, x, positions, before)


def _fire_of_no_values(asked: Tensor, x: Tensor, positions: Tensor, before: Tensor | None, name: str) -> Tensor:
    return x.new_empty(x.shape[:1], dtype=torch.bool)


direct_register_custom_op("amor_fire", _fire, fake_impl=_fire_of_no_values)
