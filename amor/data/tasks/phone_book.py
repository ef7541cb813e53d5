"""A phone book: entries of first name, last name and a number of several digits; then some names,
whose numbers are asked for.

No two entries have the same two names, but many share one of them: who looks for one name alone
finds the wrong number.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from amor.data.chance import Chance
from amor.data.tasks.base import Drawn, Loss, Some, Task, Words, ask, at_most, joined
from amor.errors import AmorError

DIGITS, MARK = 10, 10  # tokens 0 .. 9, and the mark before a question; names follow
FIRST = MARK + 1


@dataclass(frozen=True)
class PhoneBook(Task):
    """Which number belongs to this name?

    vocab: ten digits, a mark, and names. entries: names with a number in a row. digits: of a
    number. queries: names per row whose number is the question.
    """

    kind = "phone_book"
    vocab: Words = 27
    entries: Some = 8
    digits: Annotated[int, Meta(ge=1, le=64)] = 4
    queries: Some = 2
    loss: Loss = "questions"

    @property
    def names(self) -> int:
        """Tokens that are names."""
        return self.vocab - FIRST

    @property
    def length(self) -> int:
        """Every token but the last is read."""
        return self.entries * (2 + self.digits) + self.queries * (3 + self.digits) - 1

    def check(self) -> None:
        if self.names < 1:
            raise AmorError(
                f"phone-book: vocab {self.vocab} holds no names beside ten digits and a mark; "
                f"give at least {FIRST + 1}"
            )
        at_most(
            "phone-book: entries",
            self.entries,
            self.names**2,
            f"{self.names} names make no more pairs",
        )
        at_most("phone-book: queries", self.queries, self.entries, "an entry is asked for once")

    @property
    def chance(self) -> float:
        return 1 / DIGITS

    def draw(self, chance: Chance) -> Drawn:
        rows = chance.rows
        names = (
            np.stack(np.divmod(chance.distinct(self.names**2, self.entries), self.names), axis=2)
            + FIRST
        )
        numbers = chance.below(DIGITS, self.entries * self.digits).reshape(
            rows, self.entries, self.digits
        )
        book = np.concatenate([names, numbers], axis=2)
        which = chance.distinct(self.entries, self.queries)[:, :, None]
        marks = np.full((rows, self.queries, 1), MARK)
        questions = np.concatenate([marks, np.take_along_axis(book, which, 1)], axis=2)
        tokens = np.concatenate([joined(book), joined(questions)], axis=1)
        starts = self.entries * (2 + self.digits) + np.arange(self.queries)[:, None] * (
            3 + self.digits
        )
        places = starts + 2 + np.arange(self.digits)
        return ask(tokens, np.broadcast_to(places, (rows, *places.shape)))
