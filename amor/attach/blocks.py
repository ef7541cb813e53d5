"""Gated blocks behind a trained backbone: their options, the attached model, and its files.

The backbone's tensors are taken as they are; blocks start closed (W_O = 0) and no final norm
follows them, so the output of the attached model equals the backbone's to the bit, whether its
gates fire or not, until a block has learned something.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amor.config import Config
from amor.convert.opened import Opened
from amor.convert.write import copy_tokenizer
from amor.errors import AmorError
from amor.files import atomic_folder
from amor.gates.base import find_gate
from amor.models.amor import Amor
from amor.models.build import build
from amor.models.folder import load_config, save


@dataclass(frozen=True)
class AttachOptions:
    """The blocks to attach; defaults are the paper's.

    Attributes:
        blocks: how many gated attention blocks stand behind the backbone.
        gate: a kind of amor/gates.
        rate: target fraction of tokens that fire, between 0 and 1; None: the gate's own rule.
        head_size: channels of one attention head; the backbone's width is a multiple of it.
        probe: the vector that gates read the head with, as blocks.probe in a config.
    """

    blocks: int = 3
    gate: str = "entropy"
    rate: float | None = None
    head_size: int = 64
    probe: str = "block"

    def keys(self) -> dict[str, Any]:
        """The changes of the backbone's config, by dotted key."""
        if self.blocks < 1:
            raise AmorError(f"--blocks {self.blocks}: give at least 1")
        gate, options = self.gate, {}
        if self.rate is not None:
            if not 0 < self.rate < 1:
                raise AmorError(f"--fire-rate {self.rate}: give a share between 0 and 1, e.g. 0.2")
            gate, options = gate_with_rate(self.gate), {"rate": self.rate}
        return {
            "blocks.count": self.blocks,
            "blocks.gate": gate,
            "blocks.gate_options": options,
            "blocks.head_size": self.head_size,
            "blocks.final": "none",
            "blocks.probe": self.probe,
        }


def gate_with_rate(gate: str) -> str:
    """The kind of gate that decides by the same score and has a target firing rate."""
    kind = "quantile" if gate == "entropy" else gate
    if "rate" not in getattr(find_gate(kind).Options, "__dataclass_fields__", {}):
        raise AmorError(
            f"--fire-rate: gate {gate!r} has no target firing rate; use entropy (which becomes "
            "quantile), learned, gain or random"
        )
    return kind


def attached(backbone: Amor, options: AttachOptions, seed: int = 42) -> Amor:
    """The backbone with fresh blocks behind it; `seed`: of their initial weights."""
    config = backbone.config
    check_backbone(config)
    changed = config.change(name=f"{config.name}-amor", **options.keys())
    model = build(changed, seed)
    missing, unexpected = model.load_state_dict(backbone.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("blocks.") for name in missing)
    return model.eval()


def check_backbone(config: Config) -> None:
    """Refuse a model that blocks cannot stand behind; its config decides that."""
    if config.blocks.count:
        raise AmorError(
            f"{config.name} has {config.blocks.count} gated blocks already; give a model without"
        )
    if set(config.pattern) <= {"attention"}:
        raise AmorError(
            f"{config.name} is attention throughout: gated attention behind it saves nothing; "
            "give a recurrent model"
        )


def table(model: Amor, backbone: str, frozen: bool) -> list[str]:
    """One line of text per part of the model: trained or frozen, its size, its initial values."""
    parts: dict[str, tuple[str, int]] = {}
    for name, p in model.named_parameters():
        where, begins = initial_value(name, backbone, model.config.init_std)
        parts[where] = begins, parts.get(where, (begins, 0))[1] + p.numel()
    rows = []
    for where, (begins, numbers) in parts.items():
        state = "frozen" if frozen and not where.startswith("blocks") else "trained"
        rows.append(f"  {state:<8} {where:<34} {numbers:>13,} parameters   {begins}")
    return rows


def initial_value(name: str, backbone: str, std: float) -> tuple[str, str]:
    """The part a parameter belongs to, and how it is initialised, as text."""
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


def write(opened: Opened, model: Amor, folder: Path) -> None:
    """Write the attached model with the backbone's tokenizer."""
    with atomic_folder(folder) as beside:
        save(model, beside)
        copy_tokenizer(opened, beside)


def write_start(opened: Opened, model: Amor, start: Path) -> None:
    """Write the model before its first step, unless an earlier call of the same command has."""
    if not (start / "config.json").is_file():
        write(opened, model, start)
    elif load_config(start) != model.config:
        raise AmorError(
            f"{start.parent} holds blocks of another kind or backbone; give another --out"
        )
