"""What a run remembers of its task at other sizes: with fewer pairs than it has learned, or with more."""

from amor.experiment.kinds.recall import learned
from amor.experiment.subject import Subject
from amor.judge.recall import recall
from amor.records.study import AtSizes, Reach

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: AtSizes) -> Reach:
    tasks = [learned(subject).change(**changes) for changes in asked.at]
    return Reach(sizes=tuple(recall(subject.model, task, rows=asked.rows, seed=asked.seed) for task in tasks))
