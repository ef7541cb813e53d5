"""The layers of our models made of vLLM's parts, on the flat tokens of a step [N, D]; tensors have
our names where possible."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention as PagedAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.rotary_embedding import get_rope

from amor.config import Config
from amor.mixers.attention import AttentionOptions
from amor.mixers.mamba2 import Mamba2Options
from amor.vllm.own import OwnMixer


class VllmSwiGLU(nn.Module):
    """down(silu(gate x) * up x), split over tensor parallel ranks."""

    def __init__(self, width: int, inner: int, vllm: VllmConfig, prefix: str):
        super().__init__()
        quant = vllm.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [inner, inner], bias=False, quant_config=quant, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            inner, width, bias=False, quant_config=quant, prefix=f"{prefix}.down_proj"
        )
        self.act = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)[0]))[0]


class VllmAttention(nn.Module):
    """Rotary attention over pages of keys and values, which vLLM keeps under the name of `attn`."""

    def __init__(self, width: int, options: AttentionOptions, vllm: VllmConfig, prefix: str):
        super().__init__()
        size, inner, quant = options.head_size, options.width or width, vllm.quant_config
        heads = inner // size
        self.qkv_proj = QKVParallelLinear(
            width, size, heads, bias=False, quant_config=quant, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            inner, width, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )
        self.rope = get_rope(
            size,
            vllm.model_config.max_model_len,
            is_neox_style=True,
            rope_parameters={"rope_type": "default", "rope_theta": options.rope_theta},
        )
        own = self.qkv_proj.num_heads  # of this rank
        self.attn = PagedAttention(
            own,
            size,
            size**-0.5,
            num_kv_heads=own,
            cache_config=vllm.cache_config,
            quant_config=quant,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].chunk(3, dim=-1)
        q, k = self.rope(positions, q.contiguous(), k.contiguous())
        return self.o_proj(self.attn(q, k, v))[0]


class VllmMamba2(MambaMixer2):
    """vLLM's Mamba2 with our norm."""

    def __init__(
        self, width: int, options: Mamba2Options, eps: float, vllm: VllmConfig, prefix: str
    ):
        inner = options.expand * width
        super().__init__(
            hidden_size=width,
            ssm_state_size=options.state_size,
            conv_kernel_size=options.conv,
            intermediate_size=inner,
            use_conv_bias=True,
            use_bias=False,
            n_groups=options.groups,
            num_heads=inner // options.head_size,
            head_dim=options.head_size,
            rms_norm_eps=eps,
            activation="silu",
            model_config=vllm.model_config,
            cache_config=vllm.cache_config,
            quant_config=vllm.quant_config,
            prefix=prefix,
        )
        # ours is over all channels, vLLM's over those of a group
        self.norm = Mixer2RMSNormGated(inner, 1, eps=eps)


class VllmFused(nn.Module):
    """Mamba2 and attention side by side; the mean of both, normed and scaled."""

    def __init__(self, config: Config, vllm: VllmConfig, prefix: str):
        super().__init__()
        options, width, eps = config.mixer_options("fused"), config.width, config.eps("mixer")
        self.mamba2 = VllmMamba2(width, options.mamba2, eps, vllm, f"{prefix}.mamba2")
        self.attention = VllmAttention(width, options.attention(width), vllm, f"{prefix}.attention")
        self.mamba2_norm, self.attention_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.mamba2_scale = nn.Parameter(torch.ones(width))
        self.attention_scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        m = self.mamba2_norm(self.mamba2(x)) * self.mamba2_scale
        a = self.attention_norm(self.attention(x, positions)) * self.attention_scale
        return (m + a) / 2


def mixer_of(config: Config, kind: str, vllm: VllmConfig, prefix: str) -> nn.Module:
    """The mixer of a kind: of vLLM's layers, or ours where vLLM has none."""
    if kind == "fused":
        return VllmFused(config, vllm, prefix)
    if kind == "attention":
        return VllmAttention(config.width, config.mixer_options(kind), vllm, prefix)
    if kind == "mamba2":
        options, eps = config.mixer_options(kind), config.eps("mixer")
        return VllmMamba2(config.width, options, eps, vllm, prefix)
    return OwnMixer(config, kind, vllm, prefix)


class VllmLayer(nn.Module):
    """h + mixer(norm h), then h + mlp(norm h)."""

    def __init__(self, config: Config, kind: str, vllm: VllmConfig, prefix: str):
        super().__init__()
        self.mixer_norm = RMSNorm(config.width, config.eps("mixer_norm"))
        self.mixer = mixer_of(config, kind, vllm, f"{prefix}.mixer")
        self.mlp_norm = RMSNorm(config.width, config.eps("mlp_norm")) if config.d_ff else None
        width, d_ff = config.width, config.d_ff
        self.mlp = VllmSwiGLU(width, d_ff, vllm, f"{prefix}.mlp") if d_ff else None

    def forward(self, h: Tensor, positions: Tensor) -> Tensor:
        x = self.mixer_norm(h)
        recurrent = isinstance(self.mixer, VllmMamba2 | OwnMixer)
        h = h + (self.mixer(x) if recurrent else self.mixer(x, positions))
        return h if self.mlp is None or self.mlp_norm is None else h + self.mlp(self.mlp_norm(h))
