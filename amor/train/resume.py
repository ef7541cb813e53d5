"""Whether a run may resume under a recipe, and which keys of the recipe have changed since."""

from collections.abc import Collection
from typing import Any

from amor import typed
from amor.errors import AmorError
from amor.run import Run
from amor.train.recipe import Recipe

CHOICES = ("auto", "yes", "no")
# keys that define a run: with another value it would be another run
FIXED = ("model", "task", "documents", "context", "batch", "seed", "freeze")
# where and how it is computed and evaluated: may change silently
FREE = (
    *("name", "data", "verify", "micro_batch", "precision", "device", "recompute", "compile"),
    *("eval", "checkpoint", "distributed", "track"),
)


def recipe_of(run: Run) -> Recipe:
    """The recipe a run was made with."""
    try:
        return Recipe.from_dict(run.read_config())
    except AmorError as error:
        raise AmorError(f"{run.config}: {error}") from None


def differences(
    before: Recipe, recipe: Recipe, free: Collection[str] = FREE
) -> dict[str, tuple[Any, Any]]:
    """Changed keys that are not free, with their two values (before, now); a changed key of FIXED
    is an error.
    """
    old, new = typed.flat(before.to_dict()), typed.flat(recipe.to_dict())
    changed = {
        key: (old.get(key), new.get(key))
        for key in old.keys() | new.keys()
        if old.get(key) != new.get(key)
    }
    for key, (was, now) in sorted(changed.items()):
        if key.split(".")[0] in FIXED:
            raise AmorError(
                f"this run was made with {key} = {was!r}, not {now!r}; "
                f"give back {was!r} or another --out"
            )
    return {key: pair for key, pair in sorted(changed.items()) if key.split(".")[0] not in free}
