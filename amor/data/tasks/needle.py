"""A needle at a distance: a key with its value somewhere in random filler, and at the end the key
again; what was the value?

With several needles one of them is asked for. A distance may be set: tokens between the value and
the question.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from amor.data.chance import Chance
from amor.data.tasks.base import Drawn, Length, Loss, Some, Task, Words, ask, at_most, joined
from amor.errors import AmorError


@dataclass(frozen=True)
class Needle(Task):
    """Which value came with this key, in filler?

    vocab: a quarter are keys, a quarter is what values are made of, half is filler.
    needles: keys with a value in a row; one of them is the question.
    value: tokens of an answer; more than one, so that an answer is more than a lucky guess.
    distance: tokens between the value and the question; -1: any.
    """

    kind = "needle"
    vocab: Words = 64
    length: Length = 128
    needles: Some = 1
    value: Annotated[int, Meta(ge=1, le=256)] = 2
    distance: Annotated[int, Meta(ge=-1, le=2**20)] = -1
    loss: Loss = "questions"

    @property
    def body(self) -> int:
        """Tokens before the question."""
        return self.length - self.value

    @property
    def each(self) -> int:
        """Tokens of a needle."""
        return 1 + self.value

    def check(self) -> None:
        why = f"keys are a quarter of a vocabulary of {self.vocab:,}"
        at_most("needle: needles", self.needles, self.vocab // 4, why)
        room = self.body - self.needles * self.each
        if room < 0:
            raise AmorError(f"needle: length {self.length} is too short; give {self.length - room}")
        why = f"the needle stands in a length of {self.length:,}"
        at_most("needle: distance", self.distance, room, why)
        if self.distance >= 0 and self.needles > 1:
            raise AmorError(
                f"needle: distance {self.distance} is for one needle, not {self.needles}; leave "
                "one of the two away"
            )

    @property
    def chance(self) -> float:
        return 1 / (self.vocab // 4)

    def draw(self, chance: Chance) -> Drawn:
        rows, quarter = chance.rows, self.vocab // 4
        keys = chance.distinct(quarter, self.needles)[:, :, None]
        values = chance.below(quarter, self.needles * self.value) + quarter
        needles = np.concatenate([keys, values.reshape(rows, self.needles, self.value)], axis=2)
        tokens = chance.below(self.vocab - 2 * quarter, self.length + 1) + 2 * quarter
        starts = self.starts(chance)[:, :, None] + np.arange(self.each)
        np.put_along_axis(tokens, joined(starts), joined(needles), 1)
        which = chance.below(self.needles, 1)[:, :, None]
        tokens[:, self.body :] = np.take_along_axis(needles, which, 1)[:, 0]
        places = np.arange(self.body, self.length)
        return ask(tokens, np.broadcast_to(places, (rows, 1, self.value)))

    def starts(self, chance: Chance) -> np.ndarray:
        """[rows, needles] where each needle begins, from left to right."""
        if self.distance >= 0:
            return np.full((chance.rows, 1), self.body - self.distance - self.each)
        units = self.body - self.needles * self.value  # a needle is one of them
        return (
            np.sort(chance.distinct(units, self.needles), axis=1)
            + np.arange(self.needles) * self.value
        )
