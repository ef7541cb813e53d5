"""S-NIAH 1 to 3 by the harness's own generator, whose lengths are upper bounds; the paper's numbers
are compared with either."""

from amor.eval.task_specs import HarnessNeedleTask
from amor.eval.tasks.niah_single import FORMS

TASKS = tuple(
    HarnessNeedleTask(
        name=f"niah_stock_{number}",
        suite="niah",
        number=number,
        form=form,
        title=f"S{number} {{}} stock",
        paper=f"niah_single_{number}",
        place=3 + number,
    )
    for number, form in FORMS.items()
)
