"""Selective copying: symbols among blanks, then a mark, then the symbols in their order without the
blanks.

As in Mamba's task the symbols stand anywhere; as in a text, each symbol that was to be written is
read before the next one.
"""

from dataclasses import dataclass

import numpy as np

from amor.data.chance import Chance
from amor.data.tasks.base import Drawn, Length, Loss, Some, Task, Words, ask, at_most

BLANK, MARK, FIRST = 0, 1, 2  # tokens; symbols follow


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Which symbols were there, without the blanks?

    vocab: a blank, a mark, and symbols. symbols: of a row that are to be copied, among blanks.
    """

    kind = "selective_copy"
    vocab: Words = 18
    length: Length = 64
    symbols: Some = 8
    loss: Loss = "questions"

    def check(self) -> None:
        why = f"a length of {self.length:,} holds the symbols twice"
        at_most("selective-copy: symbols", self.symbols, self.length // 2, why)

    @property
    def chance(self) -> float:
        return 1 / (self.vocab - FIRST)

    def draw(self, chance: Chance) -> Drawn:
        body = self.length - self.symbols
        symbols = chance.below(self.vocab - FIRST, self.symbols) + FIRST
        tokens = np.full((chance.rows, self.length + 1), BLANK, dtype=np.int64)
        np.put_along_axis(tokens, np.sort(chance.distinct(body, self.symbols), axis=1), symbols, 1)
        tokens[:, body] = MARK
        tokens[:, body + 1 :] = symbols
        places = np.arange(body, self.length)
        return ask(tokens, np.broadcast_to(places, (chance.rows, 1, self.symbols)))
