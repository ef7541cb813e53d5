"""The gates at the end of training: how often they fired, their thresholds, how wide their blocks were open."""

import statistics

from amor.experiment.subject import Subject
from amor.records.run import Step, mean_of, settled
from amor.records.study import BlockMean, Gates, OnMetrics

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: OnMetrics) -> Gates:
    last = list(settled(subject.steps))
    return Gates(steps=len(last), blocks=tuple(_mean(last, block) for block in range(len(last[0].blocks))))


def _mean(steps: list[Step], block: int) -> BlockMean:
    fire = statistics.mean(line.blocks[block].fire for line in steps)
    return BlockMean(fire=fire, **{key: mean_of(steps, block, key) for key in ("mu", "sigma", "tau", "alpha")})
