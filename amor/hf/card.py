"""The model card of a folder: facts of the model itself, and how to load it; no other claims."""

from __future__ import annotations

from itertools import groupby

from amor.config import Config
from amor.gates.base import SKETCH, Adaptive
from amor.models.amor import Amor
from amor.models.block import Block

MARK = "<!-- written by amor.hf from the model itself; replaced when the model is saved again -->"
FACE = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- amor
---
"""
LOAD = """## How to load it

```python
import amor.hf  # or trust_remote_code=True below; both need the package amor
from transformers import AutoModelForCausalLM{more}

folder = "."
model = AutoModelForCausalLM.from_pretrained(folder)
{use}
```

`amor.load(folder)` opens the same folder without transformers.
"""
WITH_TEXT = LOAD.format(
    more=", AutoTokenizer",
    use="""tokenizer = AutoTokenizer.from_pretrained(folder)
batch = tokenizer(["The state of the Union is"], return_tensors="pt")
text = model.generate(**batch, max_new_tokens=50, do_sample=True, temperature=0.8)
print(tokenizer.decode(text[0], skip_special_tokens=True))""",
)
WITHOUT_TEXT = LOAD.format(
    more="",
    use="model.generate(tokens, max_new_tokens=50)  "
    "# whole numbers [rows, columns]: it has no tokenizer",
)


def card(model: Amor, tokenizer: bool) -> str:
    """The text of README.md; tokenizer: whether the folder has one."""
    config = model.config
    size = sum(p.numel() for p in model.parameters())
    rows = {
        "parameters": f"{size:,}",
        "layers": pattern(config),
        "width": str(config.width),
        "vocabulary": f"{config.vocab:,}",
        "context in training": f"{config.context:,} tokens",
    }
    if config.blocks.count:
        rows["gated attention blocks"] = f"{config.blocks.count}, gate `{config.blocks.gate}`"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    parts = [FACE + MARK, f"# {config.name}", f"| | |\n|---|---|\n{table}"]
    if model.blocks:
        parts.append(gates(model))
    return "\n\n".join([*parts, WITH_TEXT if tokenizer else WITHOUT_TEXT])


def pattern(config: Config) -> str:
    """Runs of the same layer, each once: mamba2 x4, attention, mamba2 x7."""
    runs = [(kind, len(list(run))) for kind, run in groupby(config.pattern)]
    return ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in runs)


def gates(model: Amor) -> str:
    """A table of the thresholds."""
    lines = ["| block | threshold | share of scores met in training above it |", "|---|---|---|"]
    lines += [
        f"| {index} | {threshold_cells(block)} |" for index, block in enumerate(model.each_block())
    ]
    return "Attention runs on a token where its gate's score is above a threshold.\n\n" + "\n".join(
        lines
    )


def threshold_cells(block: Block) -> str:
    """Two cells: the threshold, and how often scores of training were above it."""
    gate = block.gate.decider
    if gate is not block.gate:
        return "fires where block 0 does | "
    if not isinstance(gate, Adaptive):
        return "none is learned | "
    if int(gate.updates) == 0:
        return "has met no data yet: never fires | "
    threshold = float(gate.threshold)
    if not bool(gate.quantiles.any()):  # converted: a median and a std alone
        return f"{threshold:.4f} | not known"
    below = float((gate.quantiles.float() <= threshold).sum() - 1) / (SKETCH - 1)
    return f"{threshold:.4f} | about {1 - min(max(below, 0.0), 1.0):.0%}"
