"""A recurrent mixer of ours inside vLLM, by our own operators, where vLLM has no layer for it.

The mixer is the one of amor/mixers, whole: vLLM keeps one state per request, and its metadata name
the rows of a step that belong to each. Every tensor parallel rank computes all of it. The contents
of a step are read from Python, so these models run without graphs.
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


def own_mixer(config: Config, kind: str) -> Mixer:
    """The mixer of a kind with the options of a config."""
    return find_mixer(kind)(config.width, config.mixer_options(kind), config.eps("mixer"))


def fresh_state(config: Config, kind: str, dtype: torch.dtype) -> Part:
    """The state of one row that has read nothing, on the meta device."""
    with torch.device("meta"):
        mixer = own_mixer(config, kind)
        return mixer.start(1, torch.device("meta"), dtype)


class OwnMixer(nn.Module, MambaBase):
    """A mixer of amor/mixers as a recurrent layer of vLLM."""

    def __init__(self, config: Config, kind: str, vllm: VllmConfig, prefix: str):
        super().__init__()
        self.inner = own_mixer(config, kind)
        self.state = fresh_state(config, kind, vllm.model_config.dtype)
        self.prefix = prefix
        self.kv_cache: tuple[Tensor, ...] = ()
        vllm.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(t.shape[1:]) for t in self.state.values())  # type: ignore[union-attr]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(t.dtype for t in self.state.values())  # type: ignore[union-attr]

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    @property
    def is_kv_cache_tp_replicated(self) -> bool:
        return True

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """x [N, D]: first the requests that write one token, then those that read several."""
        metadata_of = get_forward_context().attn_metadata
        if metadata_of is None:  # vLLM measures how much memory a step takes
            state = self.inner.start(1, x.device, x.dtype)
            return self.inner(x[None], state, _layout(1, len(x), x))[0][0]
        metadata: LinearAttentionMetadata = metadata_of[self.prefix]
        ends, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        out, single = torch.zeros_like(x), metadata.num_decodes
        groups = [(0, single)] if single else []
        groups += [(row, row + 1) for row in range(single, single + metadata.num_prefills)]
        for first, last in groups:
            counts = [ends[row + 1] - ends[row] for row in range(first, last)]
            begins = [
                lengths[row] == count for row, count in zip(range(first, last), counts, strict=True)
            ]
            here = slice(ends[first], ends[last])
            rows = x[here].view(last - first, counts[0], -1)
            y = self._rows(rows, metadata.state_indices_tensor[first:last], begins)
            out[here] = y.flatten(0, 1)
        return out

    def _rows(self, x: Tensor, places: Tensor, begins: list[bool]) -> Tensor:
        """Requests [B, T, D] continue from the states at their places, or begin from nothing."""
        new = torch.tensor(begins, device=x.device)
        state: Part = {}
        for name, cache in self._caches():
            old = cache[places]
            mask = new.view(-1, *[1] * (old.ndim - 1))
            state[name] = torch.where(mask, torch.zeros_like(old), old)
        y, after = self.inner(x, state, _layout(x.shape[0], x.shape[1], x))
        for name, cache in self._caches():
            cache[places] = after[name].to(cache.dtype)
        return y

    def _caches(self) -> Iterator[tuple[str, Tensor]]:
        """vLLM's caches of all requests, by the names of the mixer's state."""
        return zip(self.state, self.kv_cache, strict=True)


def _layout(rows: int, columns: int, x: Tensor) -> Layout:
    """The layout for recurrent mixers, which use no positions."""
    return Layout(torch.zeros(rows, dtype=torch.long, device=x.device), columns, True, 0)
