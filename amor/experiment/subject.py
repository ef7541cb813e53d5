"""A finished run that is to be judged: its model, its metrics, and the held-out text it is judged
on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from amor.data.loader import Windows
from amor.data.shards import Shards, splits
from amor.errors import AmorError
from amor.judge.windows import of_shards
from amor.measures.base import TextOptions
from amor.models.amor import Amor
from amor.models.folder import WEIGHTS, load, resolve
from amor.records.run import Step
from amor.run import Run
from amor.train.checkpoint import read_manifest, read_training
from amor.train.recipe import Recipe
from amor.train.resume import recipe_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class FinishedRun:
    """A run directory; nothing of it is opened before it is needed."""

    run: Run
    threads: int = 1
    # prepared data of the same content as it learned from; "": where it was when it learned
    data: str = ""

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe it was trained by."""
        return recipe_of(self.run)

    @cached_property
    def _loaded(self) -> tuple[Amor, Tokenizer | None]:
        return load(self.run.folder)

    @property
    def model(self) -> Amor:
        """The model of its newest checkpoint."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside it; None where there is none."""
        return self._loaded[1]

    @cached_property
    def steps(self) -> list[Step]:
        """The steps of metrics.jsonl."""
        return [line for line in self.run.lines() if isinstance(line, Step)]

    @property
    def prepared(self) -> str:
        """The folder of its data; "": it learned a task."""
        return self.data or self.recipe.data

    @cached_property
    def held_out(self) -> Shards:
        """The held-out split of its data."""
        valid = splits(self.prepared)[1] if self.prepared else None
        if valid is None:
            hint = "give --data FOLDER, prepared with --valid"
            raise AmorError(f"{self.run.folder}: there is no held-out text; {hint}")
        return valid

    def windows(self, options: TextOptions) -> Windows:
        """The same windows for every run of a context."""
        folder, context = self.held_out.folder, options.context or self.recipe.context
        vocab, apart = self.model.config.vocab, self.recipe.documents == "apart"
        return of_shards(folder, context, options.windows, self.tokenizer, vocab, apart)

    @property
    def weights(self) -> str:
        """sha256 of the file of weights, from the manifest of its checkpoint."""
        return read_manifest(resolve(self.run.folder)).files[WEIGHTS].sha256


def step_of(run: Run) -> int:
    """How many steps the newest checkpoint of a run has seen; 0: there is none."""
    folder = run.folder / "latest"
    return read_training(folder).step if folder.exists() else 0
