"""Multi-query associative recall as in zoology: pairs of key and value, then each key again
somewhere; what was its value?

Keys are of [1, V/2), values of [V/2, V), neither repeats. Behind the pairs keys stand at even
places, nearer ones far more often: place i with a weight of i^(power - 1). All other places hold
random tokens, also the one behind a question.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from amor.data.chance import Chance
from amor.data.tasks.base import Drawn, Length, Loss, Some, Task, Words, ask, at_most
from amor.errors import AmorError


@dataclass(frozen=True)
class Mqar(Task):
    """Which value came with this key? The defaults are zoology's smallest.

    pairs: of key and value in a row.
    queries: questions per row; 0: every key once.
    power: of the law of distances; near 0 questions stand close behind the pairs. As in zoology.
    """

    kind = "mqar"
    vocab: Words = 512
    length: Length = 64
    pairs: Some = 8
    queries: Annotated[int, Meta(ge=0, le=2**16)] = 0
    power: Annotated[float, Meta(gt=0, le=10)] = 0.01
    loss: Loss = "questions"

    @property
    def questions(self) -> int:
        """Questions per row."""
        return self.queries or self.pairs

    def check(self) -> None:
        why = f"keys are half of a vocabulary of {self.vocab:,}, without 0"
        at_most("mqar: pairs", self.pairs, self.vocab // 2 - 1, why)
        at_most("mqar: queries", self.questions, self.pairs, "a key is asked for once")
        if self.places < self.questions:
            least = 2 * (self.pairs + self.questions)
            raise AmorError(
                f"mqar: length {self.length} is too short for {self.pairs} pairs and their "
                f"questions; give {least}"
            )

    @property
    def places(self) -> int:
        """Places at which a question may stand."""
        return (self.length - 2 * self.pairs) // 2

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - self.vocab // 2)

    def draw(self, chance: Chance) -> Drawn:
        half = self.vocab // 2
        keys = chance.distinct(half - 1, self.pairs) + 1
        values = chance.distinct(self.vocab - half, self.pairs) + half
        which = chance.distinct(self.pairs, self.questions)
        weights = np.arange(1, self.places + 1) ** (self.power - 1.0)
        places = 2 * self.pairs + 2 * chance.ranked(weights, self.questions)
        tokens = chance.below(self.vocab, self.length + 1)
        tokens[:, 0 : 2 * self.pairs : 2], tokens[:, 1 : 2 * self.pairs : 2] = keys, values
        np.put_along_axis(tokens, places, np.take_along_axis(keys, which, 1), 1)
        answers = np.take_along_axis(values, which, 1)
        return ask(tokens, places[:, :, None], answers[:, :, None])
