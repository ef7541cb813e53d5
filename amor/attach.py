"""Gated blocks behind a model that was trained without them: built, calibrated on a text, and held to what it was.

The backbone's tensors are taken as they are; blocks start closed (W_O = 0) and no final norm stands behind them, so the attached
model says what the backbone says to the bit, whether its gates fire or not, until a block has learned something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amor import registry
from amor.data.loader import Windows
from amor.errors import AmorError
from amor.gates.base import Adaptive
from amor.judge.gates import all_told, own_gates
from amor.judge.loop import gathered, read
from amor.models.amor import Amor
from amor.models.build import build
from amor.numbers import finite

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Asked:
    """The blocks a command asks for."""

    blocks: int = 3
    gate: str = "entropy"
    rate: float | None = None  # of firing; None: as the gate's own options have it
    head_size: int = 64
    probe: str = "block"  # what gates ask the head about, as blocks.probe

    def keys(self) -> dict[str, Any]:
        """What changes in the backbone's config."""
        if self.blocks < 1:
            raise AmorError(f"--blocks {self.blocks}: give at least 1")
        gate, options = self.gate, {}
        if self.rate is not None:
            if not 0 < self.rate < 1:
                raise AmorError(f"--fire-rate {self.rate}: give a share between 0 and 1, e.g. 0.2")
            gate, options = aimed(self.gate), {"rate": self.rate}
        found = {"count": self.blocks, "gate": gate, "gate_options": options, "head_size": self.head_size, "final": "none"}
        found["probe"] = self.probe
        return {f"blocks.{key}": value for key, value in found.items()}


def aimed(gate: str) -> str:
    """The gate that decides by the same score and holds a rate."""
    kind = "quantile" if gate == "entropy" else gate
    if "rate" not in getattr(registry.find("gates", kind).Options, "__dataclass_fields__", {}):  # type: ignore[attr-defined]
        raise AmorError(
            f"--fire-rate: gate {gate!r} holds no firing rate; use entropy (which becomes quantile), learned, gain or random"
        )
    return kind


def attached(backbone: Amor, asked: Asked, seed: int = 42) -> Amor:
    """The backbone with fresh blocks behind it."""
    config = backbone.config
    if config.blocks.count:
        raise AmorError(f"{config.name} has {config.blocks.count} gated blocks already; give a model without")
    if set(config.pattern) <= {"attention"}:
        raise AmorError(f"{config.name} is attention throughout: gated attention behind it saves nothing; give a recurrent model")
    changed = config.change(name=f"{config.name}-amor", **asked.keys())
    model = build(changed, seed)
    missing, unexpected = model.load_state_dict(backbone.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("blocks.") for name in missing)
    return model.eval()


@torch.no_grad()
def calibrate(model: Amor, windows: Windows) -> list[dict[str, float | None]]:
    """Set thresholds from the scores of a text, all at once; of each block: threshold, and how often it fires there.

    Blocks start as no-ops, so the score of every token is what it would be whatever the others decide.
    """
    scores = gathered(read(model, windows)).score
    model.observe([block.flatten() for block in scores])
    found = []
    for gate, seen in zip(own_gates(model), scores, strict=True):
        decider = gate.decider
        tau = finite(float(decider.threshold))
        fire = float((seen > decider.threshold).float().mean()) if isinstance(decider, Adaptive) else None
        found.append({"threshold": tau, "fire": fire})
    return found


def adapts(model: Amor) -> bool:
    """Whether a gate has a threshold to be set."""
    return any(isinstance(gate.decider, Adaptive) for gate in own_gates(model))


@torch.no_grad()
def same_said(backbone: Amor, model: Amor, windows: Windows, closed: bool) -> bool:
    """Whether two models say the same of a text to the bit; closed: the second with every gate shut."""
    rows = windows[:4]
    gates = all_told(model, False) if closed else None
    a, b = backbone(rows.tokens), model(rows.tokens, gates=gates)
    return torch.equal(a.hidden, b.hidden) and torch.equal(backbone.head_weight, model.head_weight)


def unchanged(before: Mapping[str, Tensor], model: Amor) -> list[str]:
    """The backbone's tensors that are not what they were, to the bit."""
    now = model.state_dict()
    return [name for name, t in before.items() if not torch.equal(now[name], t)]


def same_words(a: Tokenizer, b: Tokenizer, text: str) -> bool:
    """Whether two tokenizers are one: the same tokens, and the same ids for a text."""
    words = [t.get_vocab(with_added_tokens=True) for t in (a, b)]
    ids = [t.encode(text, add_special_tokens=False).ids for t in (a, b)]
    return words[0] == words[1] and ids[0] == ids[1]


def table(model: Amor, backbone: str, frozen: bool) -> list[str]:
    """What is trained and what is not, how many numbers, and what each begins as."""
    parts: dict[str, tuple[str, int]] = {}
    for name, p in model.named_parameters():
        where, begins = beginning(name, backbone)
        parts[where] = begins, parts.get(where, (begins, 0))[1] + p.numel()
    rows = []
    for where, (begins, numbers) in parts.items():
        state = "frozen" if frozen and not where.startswith("blocks") else "trained"
        rows.append(f"  {state:<8} {where:<34} {numbers:>13,} parameters   {begins}")
    return rows


def beginning(name: str, backbone: str) -> tuple[str, str]:
    """The row of a parameter, and from what it is initialised."""
    if not name.startswith("blocks."):
        part = name.split(".")[0]
        return {"embed": "embedding", "backbone": "layers"}.get(part, part), f"as in {backbone}"
    inside = name.split(".", 2)[2]
    if inside.endswith("o_proj.weight"):
        return "blocks: W_O", "0"
    if inside == "alpha":
        return "blocks: alpha", "0 (sigmoid: one half)"
    if inside.endswith("norm.weight"):
        return "blocks: norms", "1"
    if inside.startswith("gate."):
        return "blocks: gates", "N(0, 0.02)"
    if inside.startswith("mlp.down_proj"):
        return "blocks: last of the MLP", "0"
    return ("blocks: MLP" if inside.startswith("mlp.") else "blocks: W_Q, W_K, W_V"), "N(0, 0.02)"
