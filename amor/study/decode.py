"""The decode benchmark as a table: our tokens/s, firing rates and crossings beside the paper's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAPER = Path(__file__).with_name("paper.json")


def table(found: dict[str, Any]) -> str:
    """Markdown, from what `amor bench decode --out FILE` wrote. The paper's were measured at 1.5B on an H100: other hardware."""
    paper = json.loads(PAPER.read_text())["decode"]
    lines = [speeds(found, paper)] if found.get("curves") else []
    if found.get("crossings"):
        lines.append(crossings(found, paper))
    if found.get("firing"):
        lines.append(firing(found, paper))
    return "\n\n".join(lines)


def speeds(found: dict[str, Any], paper: dict[str, Any]) -> str:
    contexts = sorted({c["context"] for c in found["curves"]})
    rows = [f"| tokens/s at {found['scale']} | " + " | ".join(f"{c:,}" for c in contexts) + " | paper, 1.5b on an H100, 3K |"]
    rows.append("|---" * (len(contexts) + 2) + "|")
    for label in dict.fromkeys(c["label"] for c in found["curves"]):
        ours = {c["context"]: c["tokens_per_second"] for c in found["curves"] if c["label"] == label}
        theirs = paper["throughput_1.5b"][label.split(" ")[0]]["decode_T0_3K"]
        cells = [f"{ours[c]:.1f}" if c in ours else "-" for c in contexts]
        rows.append(f"| {label} | " + " | ".join(cells) + f" | {theirs} |")
    return "\n".join(rows)


def crossings(found: dict[str, Any], paper: dict[str, Any]) -> str:
    rows = [
        "| faster than | from, measured | equal bytes | our formula | V / (2 (1 - f)) | paper, measured at f = 0.4 |",
        "|---" * 6 + "|",
    ]
    for one in found["crossings"]:
        same = found["scale"] == "440m" and one["gated"] == "amor-mamba2 f=0.4"
        theirs = paper["crossings_440m"].get(one["other"]) if same else None
        cells = [one["measured"], one["equal_bytes"], one["our_formula"], one["paper_formula"], theirs]
        rows.append(f"| {one['gated']} over {one['other']} | " + " | ".join(map(_tokens, cells)) + " |")
    return "\n".join(rows)


def firing(found: dict[str, Any], paper: dict[str, Any]) -> str:
    rows = ["| prompt, temperature | fires, ours | paper, amor-mamba2 1.5b |", "|---|---|---|"]
    for one in found["firing"]:
        key = f"T{one['temperature']:g}/{one['prompt'] // 1024}K"
        theirs = paper["fire_rate_1.5b"]["amor-mamba2"].get(key, "-")
        rows.append(f"| {one['prompt']:,}, T = {one['temperature']:g} | {one['rate']:.3f} | {theirs} |")
    return "\n".join(rows)


def _tokens(value: float | None) -> str:
    return "-" if value is None else "from the first" if value == 0 else f"{value / 1024:.0f}K"
