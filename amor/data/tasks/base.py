"""The contract of a task: rows of tokens with questions in them whose answers stand further left.

A row is a function of its key alone (amor/data/chance.py), so it needs no file and no state.
The fields of a task give its size; `check` refuses what is impossible. Where the answer to a
question is the next token, the row is a text like any other; where it is not (mqar), the target at
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

PACKAGE = "data.tasks"
Loss = Literal["questions", "all"]  # which targets count: the answers, or every next token
Length = Annotated[int, Meta(ge=2, le=2**20)]  # tokens of a row that are read
Some = Annotated[int, Meta(ge=1, le=2**16)]  # number of pairs, questions or symbols
Words = Annotated[int, Meta(ge=4, le=2**20)]  # size of a vocabulary
FillerShare = Annotated[float, Meta(ge=0, le=0.99)]


@dataclass(frozen=True)
class Drawn:
    """Rows as a task makes them."""

    tokens: np.ndarray  # [n, T + 1]
    answers: np.ndarray  # [n, T] the target at a question, IGNORE elsewhere
    question: np.ndarray  # [n, T] number of the question an answer's token belongs to, from 1; or 0


class Task:
    """A task at a size.

    A subclass is a frozen dataclass with a `kind`, `chance` and `draw`; its fields are the options
    that a recipe may set, `vocab`, `length` and `loss` among them.

    Attributes:
        vocab: size of the vocabulary; tokens are below it.
        loss: which targets are learned: "questions" (the answers alone) or "all" (every next
            token).
    """

    kind: ClassVar[str]
    vocab: int
    loss: Loss

    @property
    def length(self) -> int:
        """T: tokens of a row that are read."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse options that contradict each other."""

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the tokens that can be answers."""
        raise NotImplementedError

    def draw(self, chance: Chance) -> Drawn:
        """One row per key of `chance`."""
        raise NotImplementedError

    def rows(self, seed: int, stream: str, step: int, first: int, last: int) -> Windows:
        """Rows first .. last - 1 of a step, with the targets that `loss` counts and the questions
        marked.
        """
        drawn = self.draw(Chance(row_keys(seed, stream, step, first, last)))
        targets = drawn.answers
        if self.loss == "all":
            targets = np.where(drawn.question > 0, drawn.answers, drawn.tokens[:, 1:])
        tokens = torch.from_numpy(np.ascontiguousarray(drawn.tokens[:, :-1]))
        question = torch.from_numpy(drawn.question)
        return Windows(tokens, torch.from_numpy(targets), question=question)

    @cached_property
    def tree(self) -> dict[str, Any]:
        """As a recipe writes it."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    def change(self, **changes: Any) -> Task:
        """The same task of another size: change(pairs=64, length=256)."""
        return read_task(self.tree | changes)


def read_task(tree: Mapping[str, Any], where: str = "task") -> Task:
    """A task from plain values such as {"kind": "mqar", "pairs": 8}; `where` names it in errors."""
    kind = tree.get("kind")
    if not isinstance(kind, str):
        raise AmorError(f"{where}: no kind; name one of {', '.join(registry.kinds(PACKAGE))}")
    task_class: type[Task] = registry.find(PACKAGE, kind.replace("-", "_"), has="draw")
    options = {key: value for key, value in tree.items() if key != "kind"}
    task = typed.convert(task_class, options, f"{where} {kind}")
    task.check()
    return task


def at_most(what: str, value: int, most: int, why: str) -> None:
    """Refuse an option above its maximum."""
    if value > most:
        raise AmorError(f"{what} is {value:,}, at most {most:,}: {why}")


def joined(parts: np.ndarray) -> np.ndarray:
    """[n, parts, tokens of each] -> [n, parts x tokens]; n may be 0."""
    return parts.reshape(len(parts), parts.shape[1] * parts.shape[2])


def ask(tokens: np.ndarray, places: np.ndarray, answers: np.ndarray | None = None) -> Drawn:
    """Rows of tokens [n, T + 1] with questions at places [n, questions, tokens of an answer].

    answers: the targets there, shaped as places; by default the next tokens.
    """
    flat, shape = joined(places), (len(tokens), tokens.shape[1] - 1)
    number = np.repeat(np.arange(1, places.shape[1] + 1), places.shape[2])
    known = np.take_along_axis(tokens, flat + 1, 1) if answers is None else joined(answers)
    targets, question = np.full(shape, IGNORE, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    np.put_along_axis(targets, flat, known, 1)
    np.put_along_axis(question, flat, np.broadcast_to(number, flat.shape), 1)
    return Drawn(tokens, targets, question)
