"""The second part of the demo: a task in which attention is needed, and what it is worth there by where it runs."""

from pathlib import Path
from typing import Any

from amor import typed
from amor.cli._seeing import Reporter, observing
from amor.data.tasks.base import read_task
from amor.gates.override import override_gates
from amor.judge.gates import own_gates
from amor.judge.recall import recall
from amor.models.folder import load_model
from amor.records.recall import Recall
from amor.train.loop import train
from amor.train.recipe import load

RECIPE = "recall/demo"


def recalled(folder: Path) -> dict[str, Any] | None:
    """Train it in `folder`, or take what is there; the share of tokens that fire, and of questions that are answered by the
    gate's choice of tokens, by as many chosen by chance, by all of them and by none. None: it was stopped."""
    recipe = load(RECIPE)
    with observing(recipe) as (observers, machine):
        watching = [observer for observer in observers if not isinstance(observer, Reporter)]
        if not train(recipe, folder, watching, "auto", machine).done:
            return None
    model, task = load_model(folder).eval(), read_task(recipe.task)
    own = recall(model, task)
    rate = fired(own, task.length)
    others = {"chance": f"random:{rate:.4f}", "everywhere": "always", "never": "never"}
    found = {name: recall(model, task, gates=override_gates(own_gates(model), gate)) for name, gate in others.items()}
    return {"rate": rate} | {name: typed.tree(each.token) for name, each in {"gate": own, **found}.items()}


def fired(found: Recall, length: int) -> float:
    """The share of all tokens of a row that fired, as a mean over blocks."""
    asked = found.answers / length
    rates = [asked * block.questions + (1 - asked) * block.elsewhere for block in found.blocks]
    return sum(rates) / len(rates)


def told(found: dict[str, Any]) -> list[str]:
    right = {name: found[name]["mean"] for name in ("gate", "chance", "everywhere", "never")}
    return [
        f"attention ran on {found['rate']:.0%} of the tokens, where the gate chose, and "
        f"[bold]{right['gate']:.0%}[/] of the answers were right",
        f"run on as many tokens chosen by chance {right['chance']:.0%}, run on all {right['everywhere']:.0%}, "
        f"run on none {right['never']:.0%}",
    ]
