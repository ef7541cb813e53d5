"""The data of a run: batches to learn from, windows to be judged by, checked before the first step."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from amor.data.loader import Batches
from amor.data.shards import Shards
from amor.errors import AmorError
from amor.train.distributed import Team
from amor.train.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Data:
    """Batches to learn from and windows to be judged by."""

    train: Batches
    valid: Batches | None
    end_of_text: int
    tokenizer: "Tokenizer"

    @classmethod
    def open(cls, recipe: Recipe, team: Team) -> "Data":
        """Everything that can be wrong with the data is found here, before the first step."""
        if not recipe.data:
            raise AmorError("the recipe names no data; give --data FOLDER, written by `amor prepare`")
        folder = Path(recipe.data)
        shards = Shards.open(folder if (folder / "manifest.json").is_file() else folder / "train")
        splits = [shards]
        valid = None
        if recipe.eval.every and (folder / "valid" / "manifest.json").is_file():
            judged = Shards.open(folder / "valid")
            judged.check(tokenizer_hash=shards.tokenizer_hash)
            windows = min(recipe.eval.windows, (judged.tokens - 1) // recipe.context) // team.world * team.world
            if windows:
                valid = Batches(judged, recipe.context, windows, recipe.seed)
                splits.append(judged)
        for split in splits:
            split.check(vocab=recipe.config().vocab)
            if recipe.verify and team.leads:
                split.verify()
        return cls(Batches(shards, recipe.context, recipe.batch, recipe.seed), valid, shards.end_of_text, shards.tokenizer())
