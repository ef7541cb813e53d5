"""Perplexity of held-out text (`amor eval --suite perplexity --text TEXT`), and bits per byte."""

from amor.eval.task_specs import ScoreColumn, TaskSpec

NAME = "perplexity"
TASKS = (
    TaskSpec(
        name=NAME,
        suite="perplexity",
        columns=(
            ScoreColumn(
                "perplexity",
                NAME,
                "perplexity",
                "fineweb_edu_ppl",
                percent=False,
                lower=True,
                digits=2,
                over=None,
            ),
            ScoreColumn(
                "bits/byte", NAME, "bits_per_byte", percent=False, lower=True, digits=3, over=None
            ),
        ),
    ),
)
