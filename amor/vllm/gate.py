"""Where a gated block fires: our own gates on the head's statistics of this step's tokens, the same
on every rank.

Tensor parallel ranks hold a part of the vocabulary each. Each reads its part in slices
(amor/ops/head), never tokens x vocabulary at once; gathered are a few numbers per token
(amor/ops/head/parts.py), joined in the same order on every rank. The decision is one operator for
torch.compile and CUDA graphs: nothing in it branches in Python on the value of a tensor.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import direct_register_custom_op

from amor.gates.base import Evidence, Gate, Verdict
from amor.gates.evidence import head_evidence
from amor.ops import head as head_op
from amor.ops.head import parts


def head_statistics(x: Tensor, head: VocabParallelEmbedding, names: Set[str]) -> dict[str, Tensor]:
    """Statistics [N] of the whole head's distribution after x [N, D], by Evidence's names."""
    best = 2 if "margin" in names else 0
    # without the pads that make the parts even
    weight = head.weight[: head.shard_indices.num_org_elements]
    if len(weight):
        mine = parts.pack_stats(head_op.read(x, weight, entropy=True, topk=best))
    else:
        mine = parts.nothing(len(x), best, x.device)
    whole = parts.joined(tensor_model_parallel_all_gather(mine[None], 0))
    return head_evidence(whole, head.org_vocab_size, names)


class Decider(nn.Module):
    """The gate of one block, which the operator finds by its name, and counts of its decisions."""

    counts: Tensor

    def __init__(
        self, gate: Gate, head: VocabParallelEmbedding, vllm: VllmConfig, prefix: str, pages: str
    ):
        """pages: the name under which vLLM keeps the block's keys and values."""
        super().__init__()
        self.gate = gate.float()  # statistics keep their digits whatever the weights are in
        self._head = (head,)  # in a tuple: it is not this module's own
        self.name, self.pages, self.page = prefix, pages, vllm.cache_config
        # tokens, and those that fired
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long), persistent=False)
        vllm.compilation_config.static_forward_context[prefix] = self

    def forward(self, probe: Tensor, x: Tensor, positions: Tensor, before: Tensor | None) -> Tensor:
        """Whether it fires [N]; probe: input of the head, x: input of the block, both [N, D]."""
        return torch.ops.vllm.amor_fire(probe, x, positions, before, self.name)

    @torch.no_grad()
    def decide(self, probe: Tensor, x: Tensor, positions: Tensor, before: Tensor | None) -> Tensor:
        """`forward`, from inside the operator."""
        names = self.gate.needs  # amor/vllm/served.py refuses gates that need more than the head
        statistics = head_statistics(probe, self._head[0], names) if names else {}
        led = None if before is None else Verdict(before, before.float())
        fire = self.gate(Evidence(x.float(), positions, **statistics, before=led)).fire
        self._count(fire)
        # an operator may not return one of its inputs
        return before.clone() if before is not None and fire is before else fire

    def _count(self, fire: Tensor) -> None:
        """Count tokens of requests only: they have a slot, and none of the first page, which vLLM
        leaves unused."""
        context = get_forward_context()
        slots = context.slot_mapping
        if context.attn_metadata is None or not isinstance(slots, dict) or self.pages not in slots:
            return  # vLLM measures how much memory a step takes
        real = slots[self.pages][: len(fire)] >= self.page.block_size
        self.counts += torch.stack([real.sum(), (real & fire[: len(real)]).sum()])


def _fire(probe: Tensor, x: Tensor, positions: Tensor, before: Tensor | None, name: str) -> Tensor:
    decider: Decider = get_forward_context().no_compile_layers[name]
    return decider.decide(probe, x, positions, before)


def _fake_fire(
    probe: Tensor, x: Tensor, positions: Tensor, before: Tensor | None, name: str
) -> Tensor:
    return x.new_empty(x.shape[:1], dtype=torch.bool)


direct_register_custom_op("amor_fire", _fire, fake_impl=_fake_fire)
