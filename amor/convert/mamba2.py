"""What transformers' and state-spaces' Mamba2 share: the names and shapes of a mixer, which are ours."""

from __future__ import annotations

from torch import Tensor

from amor.config import Config
from amor.convert.source import Tensors


def mixer(held: Tensors, config: Config, above: str, ours: str) -> dict[str, Tensor]:
    """One mixer's tensors; a convolution without a bias is one whose bias is 0."""
    o = config.mixer_options("mamba2")
    width, inner = config.width, o.expand * config.width
    heads, mixed = inner // o.head_size, inner + 2 * o.groups * o.state_size
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (inner + mixed + heads, width),
        "conv1d.weight": (mixed, 1, o.conv),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (width, inner),
    }
    found = {f"{ours}.{name}": held.take(f"{above}.{name}", *shape) for name, shape in shapes.items()}
    bias = f"{above}.conv1d.bias"
    found[f"{ours}.conv1d.bias"] = held.take(bias, mixed) if bias in held else found[f"{ours}.A_log"].new_zeros(mixed)
    return found
