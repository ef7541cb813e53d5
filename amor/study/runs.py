"""Several runs side by side: what each reached, after how many tokens and minutes."""

import statistics
from typing import Any

from amor.config import flat
from amor.errors import AmorError
from amor.presets import preset
from amor.run import Run


def compare(folders: list[Run]) -> dict[str, Any]:
    """A row a run, and the curves a figure draws."""
    rows = [told(folder) for folder in folders]
    vocabularies = {row["vocab"] for row in rows}
    if len(vocabularies) > 1:
        raise AmorError(f"runs with vocabularies of {sorted(vocabularies)}: their losses a token cannot be compared")
    return {"runs": rows}


def told(run: Run) -> dict[str, Any]:
    if not run.used:
        raise AmorError(f"{run.folder} is not a run directory (it has no config.json); amor train --out RUN writes one")
    lines = list(run.lines())
    steps = [line for line in lines if "loss" in line]
    if not steps:
        raise AmorError(f"{run.folder} holds no metrics yet; nothing has been trained in it")
    evals = [line for line in lines if "valid" in line and line["valid"]["nll"] is not None]
    minutes, passed = {}, 0.0
    for line in steps:
        passed += line["timing"]["seconds"] / 60
        minutes[line["step"]] = passed
    tokens = {line["step"]: line["tokens"] for line in steps}
    model = run.read_config()["model"]
    return {
        "run": run.folder.name,
        "model": model["name"],
        "vocab": preset(model["name"], model["scale"], **flat(model["changes"])).vocab,
        "tokens": steps[-1]["tokens"],
        "minutes": passed,
        "tokens_per_second": statistics.median(line["timing"]["tokens_per_second"] for line in steps),
        "loss": statistics.mean(line["loss"] for line in steps[-20:]),
        "valid": evals[-1]["valid"] if evals else None,
        "curve": [
            {"tokens": tokens[e["step"]], "minutes": minutes[e["step"]], "nll": e["valid"]["nll"]}
            for e in evals
            if e["step"] in tokens
        ],
        "firing": [
            {"tokens": line["tokens"], "fire": [b["fire"] for b in line["blocks"]]} for line in steps if line.get("blocks")
        ],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The table for people."""
    shown = [
        f"{'run':<24} {'tokens':>12} {'minutes':>8} {'tokens/s':>9} {'train loss':>11} {'valid loss':>11} {'perplexity':>11}"
    ]
    for row in found["runs"]:
        valid = row["valid"] or {"nll": float("nan"), "perplexity": float("nan")}
        shown.append(
            f"{row['run']:<24} {row['tokens']:>12,} {row['minutes']:>8.1f} {row['tokens_per_second']:>9,.0f} "
            f"{row['loss']:>11.3f} {valid['nll']:>11.3f} {valid['perplexity']:>11,.1f}"
        )
    return shown
