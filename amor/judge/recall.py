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

import torch
from torch import Tensor

from amor.data.generated import Generated
from amor.data.tasks.base import Task
from amor.errors import AmorError
from amor.gates.base import Gate
from amor.judge.gates import own_gates
from amor.judge.loop import ChunkOutput, GateChoice, ignore_tokens, run_windows
from amor.judge.resample import ratio
from amor.judge.windows import BatchWindows
from amor.models.amor import Amor
from amor.models.size import state_size
from amor.numbers import finite
from amor.ops import head
from amor.records.recall import Mean, Rate, Recall

ROWS = 256  # of the task; the standard error of an accuracy is then at most 3 points
TOKENS = 8192  # per forward call


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
    text = BatchWindows(Generated(task.change(loss="all"), rows, seed, "test"), 0, rows)
    at_a_time = max(1, TOKENS // task.length)
    chunks = run_windows(model, text, rows=at_a_time, gates=gates, on_tokens=on_tokens)
    parts = [_row_sums(model, output) for output in chunks]
    sums = {name: torch.cat([part[name] for part in parts], -1).double().cpu() for name in parts[0]}
    answers, elsewhere = sums["answers"], task.length - sums["answers"]
    fired = zip(sums["fired_questions"], sums["fired_elsewhere"], strict=True)
    first = text[0:1].question
    assert first is not None
    return Recall(
        model=model.config.name,
        task=task.tree,
        gate=gate_kinds(model, gates),
        seed=seed,
        rows=rows,
        questions=int(first.max()),
        answers=int((first > 0).sum()),
        chance=task.chance,
        token=_mean(sums["right"], answers),
        whole=_mean(sums["whole"], sums["questions"]),
        nll_questions=_mean(sums["nll_questions"], answers),
        nll_elsewhere=_mean(sums["nll_elsewhere"], elsewhere),
        blocks=tuple(
            Rate(questions=_share(in_answers, answers), elsewhere=_share(other, elsewhere))
            for in_answers, other in fired
        ),
        state=state_size(model.config),
    )


def right_answers(model: Amor, output: ChunkOutput) -> Tensor:
    """[rows, columns] True where the best token is that of the answer to a question."""
    targets, question = output.chunk.targets, output.chunk.question
    assert targets is not None and question is not None
    answer = question > 0
    best = head.read(output.out.hidden[answer], model.head_weight, topk=1).topk
    assert best is not None
    hits = torch.zeros_like(answer)
    hits[answer] = best[1][:, 0] == targets[answer]
    return hits


def count_answered(hits: Tensor, question: Tensor) -> Tensor:
    """[rows] the number of questions of which every token is right; question [rows, columns]:
    their numbers, 0 for none."""
    wrong = question.new_zeros(len(question), int(question.max()) + 1)
    there = torch.zeros_like(wrong).scatter_add_(1, question, torch.ones_like(question))
    wrong = wrong.scatter_add_(1, question, (~hits).long())
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


def _row_sums(model: Amor, output: ChunkOutput) -> dict[str, Tensor]:
    """Sums per row [n], and per block and row [K, n]."""
    question, hits = output.chunk.question, right_answers(model, output)
    assert question is not None
    answer, nll, fire = question > 0, output.nll.double(), output.fire
    return {
        "right": hits.sum(1),
        "answers": answer.sum(1),
        "whole": count_answered(hits, question),
        "questions": question.max(1).values,
        "nll_questions": (nll * answer).sum(1),
        "nll_elsewhere": (nll * ~answer).sum(1),
        "fired_questions": (fire & answer).sum(2),
        "fired_elsewhere": (fire & ~answer).sum(2),
    }


def _mean(top: Tensor, bottom: Tensor) -> Mean:
    if not math.isfinite(float(top.sum())):
        return Mean(mean=None, se=None)
    mean, se = ratio(top, bottom)
    return Mean(mean=finite(mean), se=finite(se) if len(top) > 1 else None)


def _share(top: Tensor, bottom: Tensor) -> float:
    return float(top.sum() / bottom.sum().clamp(min=1))
