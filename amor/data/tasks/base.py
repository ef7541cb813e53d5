"""The contract of a task: rows of tokens with questions in them whose answers stand further left.

A row is a function of its key alone (amor/data/chance.py), so it needs no file and no state.
Options say how large a task is and refuse what cannot be asked. Where the answer of a question
stands as the next token, the row is a text like any other; where it does not (mqar), the target at
the question is the answer all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from msgspec import Meta

from amor import registry, typed
from amor.data.chance import Chance, row_keys
from amor.data.loader import Windows
from amor.errors import AmorError
from amor.ops.head import IGNORE

ROOM = "data.tasks"
Loss = Literal["questions", "all"]  # which targets count: the answers, or every next token
Length = Annotated[int, Meta(ge=2, le=2**20)]  # of a row, in tokens that are read
Some = Annotated[int, Meta(ge=1, le=2**16)]  # pairs, questions, symbols
Words = Annotated[int, Meta(ge=4, le=2**20)]  # of a vocabulary
FillerShare = Annotated[float, Meta(ge=0, le=0.99)]


@dataclass(frozen=True)
class Drawn:
    """Rows as a task makes them."""

    tokens: np.ndarray  # [n, T + 1]
    answers: np.ndarray  # [n, T] what is to be said at a question, IGNORE elsewhere
    asked: (
        np.ndarray
    )  # [n, T] the number of the question an answer's token belongs to, from 1; 0 elsewhere


class Task:
    """A kind of task at a size. A subclass has a `kind`, frozen `Options` with `loss` and a
    `check`, and `draw`.
    """

    kind: ClassVar[str]
    Options: ClassVar[type]

    def __init__(self, options: Any):
        self.options = options
        options.check()

    @property
    def vocab(self) -> int:
        """Tokens are below this."""
        return int(self.options.vocab)

    @property
    def length(self) -> int:
        """T: tokens of a row that are read."""
        return int(self.options.length)

    @property
    def chance(self) -> float:
        """The accuracy of who knows which tokens are answers, and no more."""
        raise NotImplementedError

    def draw(self, chance: Chance) -> Drawn:
        raise NotImplementedError

    def rows(self, seed: int, stream: str, step: int, first: int, last: int) -> Windows:
        """Rows first .. last - 1 of a step, with targets as `loss` counts them and the questions
        marked.
        """
        drawn = self.draw(Chance(row_keys(seed, stream, step, first, last)))
        asked = drawn.asked > 0
        others = (
            drawn.tokens[:, 1:]
            if self.options.loss == "all"
            else np.full_like(drawn.answers, IGNORE)
        )
        targets = np.where(asked, drawn.answers, others)
        tokens = np.ascontiguousarray(drawn.tokens[:, :-1])
        found, wanted, marks = (torch.from_numpy(each) for each in (tokens, targets, drawn.asked))
        return Windows(found, wanted, asked=marks)

    @cached_property
    def tree(self) -> dict[str, Any]:
        """As a recipe writes it."""
        return {"kind": self.kind, **asdict(self.options)}

    def change(self, **changes: Any) -> Task:
        """The same task of another size: change(pairs=64, length=256)."""
        return read_task(self.tree | changes)


def read_task(tree: Mapping[str, Any], where: str = "task") -> Task:
    """{"kind": "mqar", "pairs": 8}: a task, or one line that says what is wrong with it."""
    kind = tree.get("kind")
    if not isinstance(kind, str):
        raise AmorError(f"{where}: no kind; name one of {', '.join(registry.kinds(ROOM))}")
    found = registry.find(ROOM, kind.replace("-", "_"))
    options = typed.convert(
        found.Options,
        {key: value for key, value in tree.items() if key != "kind"},
        f"{where} {kind}",
    )
    task = found(options)
    assert isinstance(task, Task)
    return task


def at_most(what: str, given: int, most: int, why: str) -> None:
    if given > most:
        raise AmorError(f"{what} is {given:,}, at most {most:,}: {why}")


def blank(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers and question numbers of rows in which nothing is asked yet."""
    return np.full((rows, length), IGNORE, dtype=np.int64), np.zeros((rows, length), dtype=np.int64)


def joined(parts: np.ndarray) -> np.ndarray:
    """[n, parts, tokens of each] after each other: [n, parts x tokens], of no rows too."""
    return parts.reshape(len(parts), parts.shape[1] * parts.shape[2])


def ask(answers: np.ndarray, asked: np.ndarray, tokens: np.ndarray, places: np.ndarray) -> None:
    """Mark questions at places [n, questions, tokens of an answer]: at each, the next token is the
    answer's.
    """
    flat = joined(places)
    number = np.repeat(np.arange(1, places.shape[1] + 1), places.shape[2])
    np.put_along_axis(answers, flat, np.take_along_axis(tokens, flat + 1, 1), 1)
    np.put_along_axis(asked, flat, np.broadcast_to(number, flat.shape), 1)
