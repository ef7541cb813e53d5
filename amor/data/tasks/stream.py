"""Recall in a stream: pairs of key and value, then keys with their values once more, among filler that nobody can predict.

A quarter of the vocabulary are keys, a quarter values, half is filler. What follows a key can be looked up; what follows anything
else cannot be known. A gate that fires where the next token is uncertain fires on the filler.
"""

from dataclasses import dataclass

import numpy as np

from amor.data.chance import Chance
from amor.data.tasks.base import Drawn, FillerShare, Length, Loss, Some, Task, Words, ask, at_most, blank
from amor.errors import AmorError


@dataclass(frozen=True)
class StreamOptions:
    vocab: Words = 512
    length: Length = 128
    pairs: Some = 16
    filler: FillerShare = 0.5  # share of the tokens behind the pairs
    loss: Loss = "all"

    @property
    def behind(self) -> int:
        """Tokens behind the pairs, the last one only to be predicted."""
        return self.length + 1 - 2 * self.pairs

    @property
    def questions(self) -> int:
        return round(self.behind * (1 - self.filler) / 2)

    def check(self) -> None:
        at_most("stream: pairs", self.pairs, self.vocab // 4, f"keys are a quarter of a vocabulary of {self.vocab:,}")
        if self.behind < 2 or not self.questions:
            raise AmorError(
                f"stream: length {self.length} with {self.pairs} pairs and filler {self.filler:g} leaves no room for a question; "
                f"give a length of {2 * self.pairs + int(2 / (1 - self.filler)) + 1}"
            )


class Stream(Task):
    kind = "stream"
    Options = StreamOptions
    options: StreamOptions

    @property
    def chance(self) -> float:
        return 1 / (self.vocab // 4)

    def draw(self, chance: Chance) -> Drawn:
        o, quarter = self.options, self.options.vocab // 4
        keys = chance.distinct(quarter, o.pairs)
        values = chance.distinct(quarter, o.pairs) + quarter
        tokens = chance.below(o.vocab - 2 * quarter, o.length + 1) + 2 * quarter
        tokens[:, 0 : 2 * o.pairs : 2], tokens[:, 1 : 2 * o.pairs : 2] = keys, values
        which = chance.below(o.pairs, o.questions)
        units = o.behind - o.questions  # a question is two tokens
        # the unit a question is, counted from the left, and how many questions stand before it
        units_asked = np.sort(chance.distinct(units, o.questions), axis=1)
        places = 2 * o.pairs + units_asked + np.arange(o.questions)
        np.put_along_axis(tokens, places, np.take_along_axis(keys, which, 1), 1)
        np.put_along_axis(tokens, places + 1, np.take_along_axis(values, which, 1), 1)
        answers, asked = blank(chance.rows, o.length)
        ask(answers, asked, tokens, places[:, :, None])
        return Drawn(tokens, answers, asked)
