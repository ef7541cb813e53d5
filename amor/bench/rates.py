"""How often the blocks of a trained model fire while it writes.

Prompts of several lengths are continued greedily and sampled, as the paper reports it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from amor.decode.engine import Engine, Session
from amor.decode.sample import Sampler, Sampling
from amor.errors import AmorError
from amor.models.amor import Amor
from amor.models.folder import load
from amor.records.bench import BlockFiringRates

LENGTHS, TEMPERATURES, NEW = (3072, 8192, 16384), (0.0, 1.0), 64  # NEW: tokens written


def open_gated(folder: str, text: str | None) -> tuple[Amor, list[int]]:
    """A model that has gates, and the tokens of a text file."""
    model, tokenizer = load(folder)
    if text is None or tokenizer is None:
        raise AmorError(
            "real firing rates need a text for the prompts (--text FILE) "
            "and a model folder with a tokenizer"
        )
    if not model.blocks:
        raise AmorError(f"{model.config.name} has no gates, so it has no firing rate")
    words = Path(text).read_text(errors="replace")
    if not (ids := tokenizer.encode(words, add_special_tokens=False).ids):
        raise AmorError(f"{text} holds no text")
    return model.eval(), ids


def firing_rates(
    model: Amor, ids: list[int], lengths: tuple[int, ...] | None = None
) -> list[BlockFiringRates]:
    """Firing rates over NEW tokens after the first `length` tokens of a text.

    A text shorter than a prompt is repeated, and the result carries that.
    """
    rates = []
    for length in lengths or LENGTHS:
        prompt = (ids * (-(-length // len(ids))))[:length]
        session = Engine(model).prefill([prompt], room=NEW)
        for temperature in TEMPERATURES:
            each = rates_of(session.fork(), prompt, temperature)
            mean = sum(each) / len(each)
            print(f"prompt {length}, T = {temperature:g}: fires {mean:.1%} of the time")
            rates.append(
                BlockFiringRates(
                    prompt=length,
                    temperature=temperature,
                    rate=mean,
                    rates=each,
                    repeated=len(ids) < length,
                )
            )
    return rates


def rates_of(session: Session, prompt: list[int], temperature: float) -> tuple[float, ...]:
    """Write NEW tokens; the firing rate of every block over them."""
    vocab = session.engine.model.config.vocab
    sampler = Sampler(Sampling(temperature=temperature), [0], [prompt], vocab)
    fire = [session.step(sampler.choose(session.next.logits)).fire[0] for _ in range(NEW)]
    return tuple(torch.stack(fire).double().mean(0).tolist())
