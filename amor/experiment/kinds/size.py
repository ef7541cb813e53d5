"""What a model is in numbers: parameters, FLOPs a token, and the bytes its state holds."""

from amor.experiment.subject import Subject
from amor.records.study import OnSizes, Size

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: OnSizes) -> Size:
    model = subject.model
    cost = model.cost(subject.recipe.context)
    return Size(parameters=sum(p.numel() for p in model.parameters()), flops=cost.flops, state_bytes=cost.state_held)
