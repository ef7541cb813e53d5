"""S-NIAH 1 to 3: one needle in noise or essays, prompts of exact length by our own generator
(amor/eval/niah.py)."""

from dataclasses import replace

from amor.eval.niah import NeedleForm
from amor.eval.task_specs import NeedleTask

LENGTHS = (1024, 2048, 4096)  # of the paper's columns
FORMS = {1: NeedleForm(False, "number"), 2: NeedleForm(True, "number"), 3: NeedleForm(True, "uuid")}


def _task(number: int, form: NeedleForm) -> NeedleTask:
    name = f"niah_single_{number}"
    task = NeedleTask(
        name=name, suite="niah", form=form, title=f"S{number} {{}}", paper=name, place=number
    )
    return replace(task, columns=tuple(task.column_at(length) for length in LENGTHS))


TASKS = tuple(_task(number, form) for number, form in FORMS.items())
