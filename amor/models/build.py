"""From a config to a model with its first weights."""

import os

import torch
from torch import nn

from amor.config import Config
from amor.errors import AmorError
from amor.mixers.base import Mixer
from amor.models.amor import Amor
from amor.models.block import Block
from amor.parts import RMSNorm, ShortConv


def build(config: Config, seed: int = 42, device: str | torch.device = "cpu") -> Amor:
    """A model with fresh weights.

    config: a Config, e.g. `amor.preset("amor-mamba2", "tiny")`.
    seed: of the weights; the same seed gives the same bits on every machine.
    device: where the weights live; "meta" makes the shapes only, without memory.

    The model is called as `out = model(tokens, targets=targets)` with tokens [B, T]; `out.loss` is
    the mean loss in nats per target, `out.hidden` [B, T, width] what the head reads, and
    `model.logits(out.hidden)` the logits. `help(amor.build(config).forward)` lists every argument.
    """
    with torch.device("meta"):
        model = Amor(config)
    if str(device) == "meta":
        return model
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = 4 * sum(p.numel() for p in model.parameters())
    if wanted > room:
        raise AmorError(
            f"{config.name}: its weights are {wanted / 1e9:,.0f} GB, this machine's memory "
            f"{room / 1e9:,.0f} GB"
        )
    model.to_empty(device="cpu")
    initialise(model, seed)
    return model.to(device)


@torch.no_grad()
def initialise(model: Amor, seed: int) -> None:
    """Linear, embedding and convolution weights ~ N(0, init_std); norms 1; biases 0; W_O of blocks
    0; then the mixers' own.

    conv_init = "uniform": weights and biases of short convolutions as nn.Conv1d draws them.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, ShortConv) and model.config.conv_init == "uniform":
            uniform_conv(module, generator)
        elif isinstance(module, nn.Linear | nn.Embedding | ShortConv):
            module.weight.normal_(0.0, model.config.init_std, generator=generator)
            if isinstance(module, ShortConv) and module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Mixer):
            module.reset_parameters(generator)
    for buffer in model.buffers():
        buffer.zero_()
    for module in model.modules():
        if isinstance(module, Block):
            closed_start(module)
            module.gate.start_statistics()


def uniform_conv(conv: ShortConv, generator: torch.Generator) -> None:
    """As nn.Conv1d initialises itself: every number uniform in +-1/sqrt(taps), since a channel
    reads only itself.
    """
    bound = conv.weight.shape[-1] ** -0.5
    for parameter in (conv.weight, conv.bias):
        if parameter is not None:
            parameter.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def closed_start(block: Block) -> None:
    """A block that changes nothing yet, whether it fires or not."""
    block.attention.o_proj.weight.zero_()
    block.alpha.zero_()
    if block.mlp is not None:
        block.mlp.down_proj.weight.zero_()
