"""What a model remembers: its best token at every question of a generated task, on rows that were never trained on.

    recall(model, task.change(pairs=64, length=256), rows=512, gates=all_told(model, True))

A question of several tokens is answered when each of them is the best one after the true ones before it, which is when greedy
decoding writes all of them. Errors are over rows, drawn with replacement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from amor.data.loader import Windows
from amor.data.tasks.base import Task
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.judge.gates import own_gates
from amor.judge.loop import Gates, Said, read
from amor.judge.resample import ratio
from amor.models.amor import Amor
from amor.models.size import state_size
from amor.numbers import finite
from amor.ops import head
from amor.records.recall import Mean, Rate, Recall

ROWS = 256
TOKENS = 8192  # read at a time


@dataclass(frozen=True)
class Questions:
    """The first rows of a task's stream, as text to be judged."""

    task: Task
    count: int
    seed: int
    stream: str = "test"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> Windows:
        start, stop, _ = rows.indices(self.count)
        return self.task.rows(self.seed, self.stream, 0, start, stop)


def recall(
    model: Amor,
    task: Task,
    rows: int = ROWS,
    seed: int = 0,
    gates: Gates = None,  # one a block, or a function of the place; None: the model's own
    seen: Callable[[int], None] = lambda tokens: None,
) -> Recall:
    """The model on `rows` rows of a task, of whatever size."""
    if rows < 1:
        raise AmorError(f"{rows} rows to be judged by; give at least 1")
    fits(model, task)
    text = Questions(task.change(loss="all"), rows, seed)  # so that there is a loss elsewhere as well
    at_a_time = max(1, TOKENS // task.length)
    parts = [_tally(model, said) for said in read(model, text, rows=at_a_time, gates=gates, seen=seen)]
    found = _Tally(*(torch.cat(each, -1).double().cpu() for each in zip(*(part.each for part in parts), strict=True)))
    first = text[0:1].asked
    assert first is not None
    elsewhere = task.length - found.answers
    return Recall(
        model=model.config.name,
        task=task.tree,
        gate=named(model, gates),
        seed=seed,
        rows=rows,
        questions=int(first.max()),
        answers=int((first > 0).sum()),
        chance=task.chance,
        token=_mean(found.right, found.answers),
        whole=_mean(found.whole, found.questions),
        nll_questions=_mean(found.nll_questions, found.answers),
        nll_elsewhere=_mean(found.nll_elsewhere, elsewhere),
        blocks=tuple(
            Rate(questions=_share(asked, found.answers), elsewhere=_share(other, elsewhere))
            for asked, other in zip(found.fired_questions, found.fired_elsewhere, strict=True)
        ),
        state=state_size(model.config),
    )


def right(model: Amor, said: Said) -> Tensor:
    """[rows, columns] true where the best token is the answer's; false where nothing is asked."""
    asked = questions(said.text)
    best = head.read(said.out.hidden[asked], model.head_weight, topk=1).topk
    assert best is not None
    hits = torch.zeros_like(asked)
    hits[asked] = best[1][:, 0] == said.text.targets[asked]
    return hits


def questions(text: Windows) -> Tensor:
    """[rows, columns] true at every token of an answer."""
    assert text.asked is not None, "a text without questions"
    return text.asked > 0


def answered(hits: Tensor, asked: Tensor) -> Tensor:
    """[rows] questions of which every token is right; asked [rows, columns] their numbers."""
    count = int(asked.max())
    wrong = torch.zeros(len(asked), count + 1, dtype=torch.long, device=asked.device).scatter_add_(1, asked, (~hits).long())
    there = torch.zeros_like(wrong).scatter_add_(1, asked, torch.ones_like(asked))
    return ((wrong == 0) & (there > 0))[:, 1:].sum(1)


def fits(model: Amor, task: Task) -> None:
    if task.vocab > model.config.vocab:
        raise AmorError(
            f"task {task.kind} has {task.vocab:,} tokens, but the model knows {model.config.vocab:,}; set vocab below that"
        )


def named(model: Amor, gates: Gates) -> str | None:
    """The kind of the gates, in words."""
    if callable(gates):
        return "by place"
    chosen: list[Gate] = own_gates(model) if gates is None else list(gates)
    return ", ".join(dict.fromkeys(gate.kind for gate in chosen)) or None


@dataclass(frozen=True)
class _Tally:
    """Sums a row, [n]; of blocks [K, n]."""

    right: Tensor
    answers: Tensor
    whole: Tensor
    questions: Tensor
    nll_questions: Tensor
    nll_elsewhere: Tensor
    fired_questions: Tensor
    fired_elsewhere: Tensor

    @property
    def each(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())


def _tally(model: Amor, said: Said) -> _Tally:
    assert said.text.asked is not None
    asked, hits = questions(said.text), right(model, said)
    nll, fire = said.nll.double(), said.fire
    return _Tally(
        right=hits.sum(1),
        answers=asked.sum(1),
        whole=answered(hits, said.text.asked),
        questions=said.text.asked.max(1).values,
        nll_questions=(nll * asked).sum(1),
        nll_elsewhere=(nll * ~asked).sum(1),
        fired_questions=(fire & asked).sum(2),
        fired_elsewhere=(fire & ~asked).sum(2),
    )


def _mean(top: Tensor, bottom: Tensor) -> Mean:
    if not math.isfinite(float(top.sum())):
        return Mean(mean=None, se=None)
    mean, se = ratio(top, bottom)
    return Mean(mean=finite(mean), se=finite(se) if len(top) > 1 else None)


def _share(top: Tensor, bottom: Tensor) -> float:
    return float(top.sum() / bottom.sum().clamp(min=1))
