"""Recall on a generated task: whether the model's best token answers each question, on rows it was
not trained on.

    recall(model, task.change(pairs=64, length=256), rows=512, gates=force_all(model, True))

A question of several tokens is answered when each of them is the best token after the true ones
before it, that is, when greedy decoding writes all of them. Standard errors are bootstrapped over
rows.
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
from amor.judge.loop import Chunk, ChunkOutput, GateChoice, ignore_tokens, run_windows
from amor.judge.resample import ratio
from amor.models.amor import Amor
from amor.models.size import state_size
from amor.numbers import finite
from amor.ops import head
from amor.records.recall import Mean, Rate, Recall

ROWS = 256  # of the task; the standard error of an accuracy is then at most 3 points
TOKENS = 8192  # per forward call


@dataclass(frozen=True)
class Questions:
    """The first `count` rows of a stream of a generated task, made when they are indexed."""

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
    gates: GateChoice = None,  # one per block, or a function of the place; None: the model's own
    on_tokens: Callable[[int], None] = ignore_tokens,  # called with the number of tokens read
) -> Recall:
    """Accuracy, loss and firing rates of a model on `rows` rows of a task."""
    if rows < 1:
        raise AmorError(f"{rows} rows to be judged by; give at least 1")
    check_vocab(model, task)
    # so that there is a loss elsewhere as well
    text = Questions(task.change(loss="all"), rows, seed)
    at_a_time = max(1, TOKENS // task.length)
    chunks = run_windows(model, text, rows=at_a_time, gates=gates, on_tokens=on_tokens)
    parts = [_row_sums(model, output) for output in chunks]
    sums = _RowSums(
        *(
            torch.cat(each, -1).double().cpu()
            for each in zip(*(part.all for part in parts), strict=True)
        )
    )
    first = text[0:1].asked
    assert first is not None
    elsewhere = task.length - sums.answers
    return Recall(
        model=model.config.name,
        task=task.tree,
        gate=gate_kinds(model, gates),
        seed=seed,
        rows=rows,
        questions=int(first.max()),
        answers=int((first > 0).sum()),
        chance=task.chance,
        token=_mean(sums.right, sums.answers),
        whole=_mean(sums.whole, sums.questions),
        nll_questions=_mean(sums.nll_questions, sums.answers),
        nll_elsewhere=_mean(sums.nll_elsewhere, elsewhere),
        blocks=tuple(
            Rate(questions=_share(asked, sums.answers), elsewhere=_share(other, elsewhere))
            for asked, other in zip(sums.fired_questions, sums.fired_elsewhere, strict=True)
        ),
        state=state_size(model.config),
    )


def right_answers(model: Amor, output: ChunkOutput) -> Tensor:
    """[rows, columns] True where the best token is that of the answer; False where there is no
    question."""
    targets, asked = output.chunk.targets, is_answer(output.chunk)
    assert targets is not None
    best = head.read(output.out.hidden[asked], model.head_weight, topk=1).topk
    assert best is not None
    hits = torch.zeros_like(asked)
    hits[asked] = best[1][:, 0] == targets[asked]
    return hits


def is_answer(chunk: Chunk) -> Tensor:
    """[rows, columns] True at every token of an answer."""
    assert chunk.asked is not None, "a text without questions"
    return chunk.asked > 0


def count_answered(hits: Tensor, asked: Tensor) -> Tensor:
    """[rows] the number of questions of which every token is right; asked [rows, columns]: their
    numbers, 0 for none."""
    count = int(asked.max())
    wrong = torch.zeros(len(asked), count + 1, dtype=torch.long, device=asked.device).scatter_add_(
        1, asked, (~hits).long()
    )
    there = torch.zeros_like(wrong).scatter_add_(1, asked, torch.ones_like(asked))
    return ((wrong == 0) & (there > 0))[:, 1:].sum(1)


def check_vocab(model: Amor, task: Task) -> None:
    """An error where the task uses tokens that the model does not have."""
    if task.vocab > model.config.vocab:
        sizes = f"has {task.vocab:,} tokens, but the model has {model.config.vocab:,}"
        raise AmorError(f"task {task.kind} {sizes}; set vocab below that")


def gate_kinds(model: Amor, gates: GateChoice) -> str | None:
    """The kinds of the gates, for results; None: there are none."""
    if callable(gates):
        return "by place"
    chosen: list[Gate] = own_gates(model) if gates is None else list(gates)
    return ", ".join(dict.fromkeys(gate.kind for gate in chosen)) or None


@dataclass(frozen=True)
class _RowSums:
    """Sums per row [n], and per block and row [K, n]."""

    right: Tensor
    answers: Tensor
    whole: Tensor
    questions: Tensor
    nll_questions: Tensor
    nll_elsewhere: Tensor
    fired_questions: Tensor
    fired_elsewhere: Tensor

    @property
    def all(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())


def _row_sums(model: Amor, output: ChunkOutput) -> _RowSums:
    assert output.chunk.asked is not None
    asked, hits = is_answer(output.chunk), right_answers(model, output)
    nll, fire = output.nll.double(), output.fire
    return _RowSums(
        right=hits.sum(1),
        answers=asked.sum(1),
        whole=count_answered(hits, output.chunk.asked),
        questions=output.chunk.asked.max(1).values,
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
