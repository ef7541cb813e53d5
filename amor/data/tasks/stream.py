"""Recall in a stream: pairs of key and value, then keys with their values once more, among filler
that nobody can predict.

A quarter of the vocabulary are keys, a quarter values, half is filler. What follows a key can be
looked up; what follows anything else cannot be known. A gate that fires where the next token is
uncertain fires on the filler.

With many pairs a model learns to look up sooner if some rows have few: with `fewest`, rows of
training have between `fewest` and all of them, as zoology mixes its sizes. Evaluation rows always
have all.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from amor.data.chance import Chance
from amor.data.loader import Windows
from amor.data.tasks.base import Drawn, FillerShare, Length, Loss, Some, Task, Words, ask, at_most
from amor.errors import AmorError


@dataclass(frozen=True)
class Stream(Task):
    """Which value came with this key, in a stream of filler?

    pairs: of key and value in a row. 16: more than a recurrent state of the recipes' size keeps.
    fewest: least number of pairs in a row of training, filler in place of the others; 0: all.
    filler: share of the tokens behind the pairs that are filler.
    loss: all, so that a gate meets tokens that nobody can predict.
    """

    kind = "stream"
    vocab: Words = 512
    length: Length = 128
    pairs: Some = 16
    fewest: Annotated[int, Meta(ge=0, le=2**16)] = 0
    filler: FillerShare = 0.5
    loss: Loss = "all"

    @property
    def behind(self) -> int:
        """Tokens behind the pairs, the last one only to be predicted."""
        return self.length + 1 - 2 * self.pairs

    @property
    def questions(self) -> int:
        """Questions per row."""
        return round(self.behind * (1 - self.filler) / 2)

    def check(self) -> None:
        why = f"keys are a quarter of a vocabulary of {self.vocab:,}"
        at_most("stream: pairs", self.pairs, self.vocab // 4, why)
        at_most("stream: fewest", self.fewest, self.pairs, "a row has no more pairs")
        if self.behind < 2 or not self.questions:
            raise AmorError(
                f"stream: length {self.length} with {self.pairs} pairs and filler "
                f"{self.filler:g} leaves no room for a question; "
                f"give a length of {2 * self.pairs + int(2 / (1 - self.filler)) + 1}"
            )

    @property
    def chance(self) -> float:
        return 1 / (self.vocab // 4)

    def rows(self, seed: int, stream: str, step: int, first: int, last: int) -> Windows:
        if self.fewest and stream != "train":
            return self.change(fewest=0).rows(seed, stream, step, first, last)
        return super().rows(seed, stream, step, first, last)

    def draw(self, chance: Chance) -> Drawn:
        quarter = self.vocab // 4
        pairs: int | np.ndarray = self.pairs  # of all rows, or [rows, 1]
        if self.fewest:
            pairs = self.fewest + chance.below(self.pairs - self.fewest + 1, 1)
        keys = chance.distinct(quarter, self.pairs)
        values = chance.distinct(quarter, self.pairs) + quarter
        tokens = chance.below(self.vocab - 2 * quarter, self.length + 1) + 2 * quarter
        present = np.arange(self.pairs) < pairs
        for place, token in enumerate((keys, values)):
            column = tokens[:, place : 2 * self.pairs : 2]
            column[:] = np.where(present, token, column)
        which = chance.below(pairs, self.questions)
        units = self.behind - self.questions  # a question is two tokens
        # the units that are questions, from the left; a question is one token longer than filler
        chosen = np.sort(chance.distinct(units, self.questions), axis=1)
        places = 2 * self.pairs + chosen + np.arange(self.questions)
        np.put_along_axis(tokens, places, np.take_along_axis(keys, which, 1), 1)
        np.put_along_axis(tokens, places + 1, np.take_along_axis(values, which, 1), 1)
        return ask(tokens, places[:, :, None])
