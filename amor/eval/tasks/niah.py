"""S-NIAH 1 to 3: one needle in noise or essays. Prompts have exact lengths by our own generator
(amor/eval/niah.py); those of niah_stock_* come from the harness's, whose lengths are upper bounds.
The paper's numbers are compared with either."""

from dataclasses import replace

from amor.eval.niah import LENGTHS, HarnessNeedleTask, NeedleTask


def _needles(number: int) -> tuple[NeedleTask, NeedleTask]:
    name = f"niah_single_{number}"
    ours = NeedleTask(
        name=name, suite="niah", number=number, title=f"S{number} {{}}", paper=name, place=number
    )
    stock = HarnessNeedleTask(
        name=f"niah_stock_{number}",
        suite="niah",
        number=number,
        title=f"S{number} {{}} stock",
        paper=name,
        place=3 + number,
    )
    return replace(ours, columns=tuple(ours.column_at(length) for length in LENGTHS)), stock


TASKS = tuple(task for number in (1, 2, 3) for task in _needles(number))
