"""What a run that learned a generated task remembers of rows it never met: amor/judge/recall.py."""

from amor.data.tasks.base import Task, read_task
from amor.errors import AmorError
from amor.experiment.subject import Subject
from amor.judge.recall import recall
from amor.records.recall import Recall
from amor.records.study import OnTask

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: OnTask) -> Recall:
    return recall(subject.model, learned(subject), rows=asked.rows, seed=asked.seed)


def learned(subject: Subject) -> Task:
    """What a run was trained on."""
    if not subject.recipe.task:
        raise AmorError(f"{subject.run.folder} learned a text, not a task; judge.recall and judge.reach are for runs of a task")
    return read_task(subject.recipe.task)
