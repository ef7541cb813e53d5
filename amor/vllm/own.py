"""A recurrent mixer of ours inside vLLM, by our own operators: for those that vLLM has no layer for.

The mixer is the one of amor/mixers, whole: vLLM keeps its states, one a request, and says which rows of a step are whose. Every
tensor parallel rank computes all of it. What a step holds is looked at from Python, so these models run without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from amor.config import Config
from amor.form import Part
from amor.layout import Layout
from amor.mixers.base import Mixer, find_mixer


def fresh_state(config: Config, kind: str, dtype: torch.dtype) -> Part:
    """Of one row, on the meta device."""
    with torch.device("meta"):
        mixer: Mixer = find_mixer(kind)(config.width, config.mixer_options(kind), config.eps("mixer"))
        return mixer.start(1, torch.device("meta"), dtype)


class Own(nn.Module, MambaBase):
    def __init__(self, config: Config, kind: str, vllm: VllmConfig, prefix: str):
        super().__init__()
        self.inner: Mixer = find_mixer(kind)(config.width, config.mixer_options(kind), config.eps("mixer"))
        self.state = fresh_state(config, kind, vllm.model_config.dtype)
        self.prefix = prefix
        self.kv_cache: tuple[Tensor, ...] = ()
        vllm.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(held.shape[1:]) for held in self.state.values())  # type: ignore[union-attr]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(held.dtype for held in self.state.values())  # type: ignore[union-attr]

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    @property
    def is_kv_cache_tp_replicated(self) -> bool:
        return True

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """[N, D]: requests that write one token stand first, then those that read several."""
        told = get_forward_context().attn_metadata
        if told is None:  # vLLM tries how much memory a step takes
            return self.inner(x[None], self.inner.start(1, x.device, x.dtype), _layout(1, len(x), x))[0][0]
        metadata: LinearAttentionMetadata = told[self.prefix]
        ends, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        out, single = torch.zeros_like(x), metadata.num_decodes
        groups = [(0, single)] if single else []
        for first, last in groups + [(row, row + 1) for row in range(single, single + metadata.num_prefills)]:
            counts = [ends[row + 1] - ends[row] for row in range(first, last)]
            begins = [lengths[row] == count for row, count in zip(range(first, last), counts, strict=True)]
            here = slice(ends[first], ends[last])
            y = self._rows(x[here].view(last - first, counts[0], -1), metadata.state_indices_tensor[first:last], begins)
            out[here] = y.flatten(0, 1)
        return out

    def _rows(self, x: Tensor, places: Tensor, begins: list[bool]) -> Tensor:
        """Requests [B, T, D] read on from the states at their places, or from nothing where they begin."""
        new = torch.tensor(begins, device=x.device)
        state: Part = {}
        for name, held in self._held():
            kept = held[places]
            state[name] = torch.where(new.view(-1, *[1] * (kept.ndim - 1)), torch.zeros_like(kept), kept)
        y, after = self.inner(x, state, _layout(x.shape[0], x.shape[1], x))
        for name, held in self._held():
            held[places] = after[name].to(held.dtype)
        return y

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """What vLLM keeps of every request, by the names of the mixer's state."""
        return zip(self.state, self.kv_cache, strict=True)


def _layout(rows: int, columns: int, x: Tensor) -> Layout:
    """Where recurrent mixers are, who know no positions."""
    return Layout(torch.zeros(rows, dtype=torch.long, device=x.device), columns, True, 0)
