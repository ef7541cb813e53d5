"""Other gates in front of the same attention, at equal firing rates: what each would have saved (amor/judge/choosing.py)."""

from amor.data.shards import splits
from amor.experiment.subject import Subject
from amor.judge.choosing import compare_gates
from amor.judge.windows import of_shards
from amor.records.study import AtChoices
from amor.records.value import Choosing

VERSION = 1  # raised where it finds other numbers of the same run, which makes those that stand void


def judge(subject: Subject, asked: AtChoices) -> Choosing:
    windows, apart = subject.windows(asked), subject.recipe.documents == "apart"
    train = splits(subject.prepared)[0].folder
    text = of_shards(train, windows.columns, asked.learned, subject.tokenizer, subject.model.config.vocab, apart)
    return compare_gates(subject.model, windows, text, asked.rates)
