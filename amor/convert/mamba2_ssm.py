"""state-spaces' Mamba2 (`mamba_ssm`): config.json with d_model, n_layer and ssm_cfg, weights in
pytorch_model.bin.

Its vocabulary is padded to a multiple of `pad_vocab_size_multiple`. The rows of padding are no
tokens: they are cut off, so that entropy is a share of the logarithm of the true vocabulary and no
probability falls on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from amor.config import Config
from amor.convert.base import CONTEXT, FolderLayout, Outputs
from amor.convert.mamba2_hf import fill_conv_bias, refuse_clamped_steps
from amor.convert.settings import Required, Settings, Sizes
from amor.convert.source import SourceFolder, SourceTensors
from amor.convert.written import WRITTEN, below, double, mamba2, norm
from amor.errors import AmorError, nearest

EPS = 1e-5  # of every norm; the published config does not name it
OPTIONS: Sizes = {
    "expand": ("expand", 2),
    "head_size": ("headdim", 64),
    "state_size": ("d_state", 128),
    "groups": ("ngroups", 1),
    "conv": ("d_conv", 4),
}
REQUIRED: Required = {
    "ngroups": ((1,), "with several groups mamba_ssm norms each by itself, ours all together"),
    "rmsnorm": ((True,), "our mixer norms before its last projection"),
    "norm_before_gate": ((False,), "our mixer gates first"),
    "bias": ((False,), "our projections have no bias"),
    "D_has_hdim": ((False,), "our D is one number per head"),
    "activation": (("silu", "swish"), "our mixer uses SiLU"),
}
# the initialisation of weights and the speed of kernels: nothing of what the model is
FREE = (
    *("layer", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "conv_init"),
    *("chunk_size", "use_mem_eff_path", "conv_bias"),
)


class Mamba2SSM(FolderLayout):
    """`MambaLMHeadModel` of mamba_ssm with Mamba2 layers."""

    kind = "mamba2_ssm"
    title = "state-spaces' Mamba2"
    names: ClassVar[Mapping[str, str]] = {
        r"^embed": "backbone.embedding",
        r"^head": "lm_head",
        r"^norm_f": "backbone.norm_f",
        r"\bmixer_norm": "norm",
        r"\bmlp_norm": "norm2",
        r"mlp\.down_proj": "mlp.fc2",
    }

    @classmethod
    def recognises(cls, tree: Mapping[str, Any]) -> bool:
        return "model_type" not in tree and {"d_model", "n_layer"} <= tree.keys()

    def config(self, name: str) -> Config:
        s, inner = settings(self.source)
        s.only("rms_norm", (True,), "our norms are RMSNorm")
        why = "attention layers of mamba_ssm have another form than ours"
        s.only("attn_layer_idx", ([],), why)
        keys = {
            "name": name,
            "vocab": s.count("vocab_size", 50277),
            "width": s.count("d_model"),
            "d_ff": self.mlp_width(s) if s["d_intermediate"] else 0,
            "pattern": f"mamba2 x{s.count('n_layer')}",
            "context": CONTEXT,
            "norm_eps": EPS,
            "tied": s.flag("tie_embeddings", True),
            "mixers": {"mamba2": inner.counts(OPTIONS)},
        }
        return Config.from_dict(keys, s.where)

    def mlp_width(self, s: Settings) -> int:
        """The inner size of the MLPs: mamba_ssm rounds d_intermediate up, the tensor has it."""
        s.count("d_intermediate")
        return self.source.tensors().rows("backbone.layers.0.mlp.fc1.weight") // 2

    def adapt(self, tensors: SourceTensors, config: Config) -> None:
        multiple = self.source.settings().count("pad_vocab_size_multiple", 8)
        padded = -(-config.vocab // multiple) * multiple
        for name in ("backbone.embedding.weight", "lm_head.weight"):
            if name in tensors:
                rows = tensors.take(name, padded, config.width)
                tensors.remaining[name] = rows[: config.vocab]
        for i in range(len(config.pattern) if config.d_ff else 0):
            mlp = f"backbone.layers.{i}.mlp"
            up_gate = tensors.take(f"{mlp}.fc1.weight", 2 * config.d_ff, config.width)
            for n, t in zip(("up", "gate"), up_gate.chunk(2), strict=True):
                tensors.remaining[f"{mlp}.{n}_proj.weight"] = t
        fill_conv_bias(tensors)

    @torch.no_grad()
    def outputs(self, tokens: Tensor, decided: Tensor | None = None) -> Outputs:
        s, inner = settings(self.source)
        w = double(self.source.tensors().remaining)
        shape = inner.count("headdim", 64), inner.count("d_state", 128), EPS
        h = w["backbone.embedding.weight"][tokens]
        for i in range(s.count("n_layer")):
            layer = below(w, f"backbone.layers.{i}")
            h = h + mamba2(norm(h, layer["norm.weight"], EPS), below(layer, "mixer"), *shape)
            if "mlp.fc1.weight" in layer:
                x = norm(h, layer["norm2.weight"], EPS)
                y, gate = (x @ layer["mlp.fc1.weight"].T).chunk(2, dim=-1)
                h = h + (y * F.silu(gate)) @ layer["mlp.fc2.weight"].T
        h = norm(h, w["backbone.norm_f.weight"], EPS)
        tied = s.flag("tie_embeddings", True)
        head = w["backbone.embedding.weight" if tied else "lm_head.weight"]
        return Outputs(h @ head.T, WRITTEN)


def settings(source: SourceFolder) -> tuple[Settings, Settings]:
    """Settings of the model and of its mixers; what our mixer cannot do is refused."""
    s = source.settings()
    tree = s["ssm_cfg"] or {}
    if not isinstance(tree, dict) or tree.get("layer") != "Mamba2":
        raise AmorError(
            f"{s.where}: ssm_cfg.layer is {str(tree)[:80]}; only Mamba2 is read, "
            "and without it mamba_ssm means Mamba1"
        )
    inner = Settings(tree, f"{s.where}: ssm_cfg")
    inner.require(REQUIRED)
    channels = inner.count("expand", 2) * s.count("d_model")
    inner.only("d_ssm", (channels,), "all channels of our mixer are of the recurrence")
    refuse_clamped_steps(inner, "dt_limit")
    sizes = [theirs for theirs, _ in OPTIONS.values()]
    known = (*sizes, *FREE, *REQUIRED, "d_ssm", "dt_limit")
    for key in tree.keys() - set(known):
        raise AmorError(f"{inner.where}: no key {key!r} is known; {nearest(str(key), known)}")
    return s, inner
