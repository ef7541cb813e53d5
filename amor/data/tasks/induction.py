"""Induction heads, as in Mamba: random tokens with a mark among them, and the mark again at the
end; what followed the first?
"""

from dataclasses import dataclass

import numpy as np

from amor.data.chance import Chance
from amor.data.tasks.base import Drawn, Length, Loss, Task, Words, ask
from amor.errors import AmorError

MARK = 0


@dataclass(frozen=True)
class Induction(Task):
    """Which token followed the mark?

    vocab: a mark and tokens; 17 is the vocabulary of Mamba's experiment and the mark.
    """

    kind = "induction"
    vocab: Words = 17
    length: Length = 64
    loss: Loss = "questions"

    def check(self) -> None:
        if self.length < 3:
            raise AmorError(
                f"induction: length {self.length} is too short for the mark, what follows it, "
                "and the mark; give 3"
            )

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - 1)

    def draw(self, chance: Chance) -> Drawn:
        tokens = chance.below(self.vocab - 1, self.length + 1) + 1
        place = chance.below(self.length - 2, 1)
        tokens[:, -1] = np.take_along_axis(tokens, place + 1, 1)[:, 0]
        np.put_along_axis(tokens, place, MARK, 1)
        tokens[:, -2] = MARK
        return ask(tokens, np.full((chance.rows, 1, 1), self.length - 1))
