"""The blocks that are attached: what is asked for, what they begin as, and which part of the whole
is trained.

The backbone's tensors are taken as they are; blocks start closed (W_O = 0) and no final norm stands
behind them, so the attached model says what the backbone says to the bit, whether its gates fire or
not, until a block has learned something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amor.errors import AmorError
from amor.gates.base import find_gate
from amor.models.amor import Amor
from amor.models.build import build


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
        found = {
            "count": self.blocks,
            "gate": gate,
            "gate_options": options,
            "head_size": self.head_size,
            "final": "none",
        }
        found["probe"] = self.probe
        return {f"blocks.{key}": value for key, value in found.items()}


def aimed(gate: str) -> str:
    """The gate that decides by the same score and holds a rate."""
    kind = "quantile" if gate == "entropy" else gate
    if "rate" not in getattr(find_gate(kind).Options, "__dataclass_fields__", {}):
        raise AmorError(
            f"--fire-rate: gate {gate!r} holds no firing rate; use entropy (which becomes "
            "quantile), learned, gain or random"
        )
    return kind


def attached(backbone: Amor, asked: Asked, seed: int = 42) -> Amor:
    """The backbone with fresh blocks behind it."""
    config = backbone.config
    if config.blocks.count:
        raise AmorError(
            f"{config.name} has {config.blocks.count} gated blocks already; give a model without"
        )
    if set(config.pattern) <= {"attention"}:
        raise AmorError(
            f"{config.name} is attention throughout: gated attention behind it saves nothing; "
            "give a recurrent model"
        )
    changed = config.change(name=f"{config.name}-amor", **asked.keys())
    model = build(changed, seed)
    missing, unexpected = model.load_state_dict(backbone.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("blocks.") for name in missing)
    return model.eval()


def table(model: Amor, backbone: str, frozen: bool) -> list[str]:
    """What is trained and what is not, how many numbers, and what each begins as."""
    parts: dict[str, tuple[str, int]] = {}
    for name, p in model.named_parameters():
        where, begins = beginning(name, backbone, model.config.init_std)
        parts[where] = begins, parts.get(where, (begins, 0))[1] + p.numel()
    rows = []
    for where, (begins, numbers) in parts.items():
        state = "frozen" if frozen and not where.startswith("blocks") else "trained"
        rows.append(f"  {state:<8} {where:<34} {numbers:>13,} parameters   {begins}")
    return rows


def beginning(name: str, backbone: str, std: float) -> tuple[str, str]:
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
        return "blocks: gates", f"N(0, {std:g})"
    if inside.startswith("mlp.down_proj"):
        return "blocks: last of the MLP", "0"
    return (
        "blocks: MLP" if inside.startswith("mlp.") else "blocks: W_Q, W_K, W_V"
    ), f"N(0, {std:g})"
