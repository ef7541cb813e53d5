"""How often a trained model fires while it writes: prompts of several lengths, greedy and sampled, as the paper reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amor.decode.engine import Engine
from amor.decode.sample import Sampler, Sampling
from amor.errors import AmorError
from amor.models.folder import load

LENGTHS, TEMPERATURES, NEW = (3072, 8192, 16384), (0.0, 1.0), 64


def firing_rates(folder: str, text: str | None, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Rates over NEW tokens after the first `length` tokens of a text; a text that is too short is repeated, and that is said."""
    model, tokenizer = load(Path(folder) / "latest" if (Path(folder) / "latest").exists() else folder)
    if text is None or tokenizer is None:
        raise AmorError("real firing rates need a text for the prompts (--text FILE) and a model folder with a tokenizer")
    if not model.blocks:
        raise AmorError(f"{model.config.name} has no gates, so it has no firing rate")
    ids = tokenizer.encode(Path(text).read_text(errors="replace"), add_special_tokens=False).ids
    if not ids:
        raise AmorError(f"{text} holds no text")
    found = []
    for length in lengths:
        prompt = (ids * (-(-length // len(ids))))[:length]
        engine = Engine(model)
        session = engine.prefill([prompt], room=NEW)
        for temperature in TEMPERATURES:
            rates = written(engine, session.fork(), prompt, temperature)
            found.append({"prompt": length, "temperature": temperature, "rates": rates, "rate": sum(rates) / len(rates)})
            found[-1]["repeated"] = len(ids) < length
            print(f"prompt {length}, T = {temperature:g}: fires {found[-1]['rate']:.1%} of the time")
    return found


def written(engine: Engine, session: Any, prompt: list[int], temperature: float) -> list[float]:
    """The rate of every block over the tokens written."""
    before, tokens = list(engine.tally.fired), engine.tally.tokens
    sampler = Sampler(Sampling(temperature=temperature), [0], [prompt], engine.model.config.vocab)
    for _ in range(NEW):
        session.step(sampler.choose(session.next.logits))
    counted = engine.tally.tokens - tokens
    return [(now - was) / counted for now, was in zip(engine.tally.fired, before, strict=True)]
