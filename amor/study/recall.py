"""What a model recalls of a task, as lines for people."""

from amor.records.recall import Mean, Recall


def lines(recall: Recall) -> list[str]:
    """The result for a terminal, one line per number."""
    options = ", ".join(f"{key} {value}" for key, value in recall.task.items() if key != "kind")
    text = [
        f"{recall.model} on {recall.task['kind']} ({options})",
        f"  asked        {recall.questions} questions of {recall.answers // recall.questions} "
        f"tokens in each of {recall.rows:,} rows",
        f"  right        {share(recall.token)} of their tokens (by chance {recall.chance:.1%}), "
        f"{share(recall.whole)} of them whole",
        f"  nats         {number(recall.nll_questions)} per token of an answer, "
        f"{number(recall.nll_elsewhere)} elsewhere",
        f"  state        {recall.state.fixed:,} numbers, and {recall.state.a_token:,} for each "
        "token read",
        *([f"  gate         {recall.gate}"] if recall.gate else []),
    ]
    for index, block in enumerate(recall.blocks):
        text.append(
            f"  block {index}      fires on {block.questions:.1%} of the questions, "
            f"{block.elsewhere:.1%} elsewhere"
        )
    return text


def share(value: Mean) -> str:
    """A mean and its error in percent."""
    if value.mean is None:
        return "-"
    return f"{value.mean:.1%}" + ("" if value.se is None else f" ± {value.se:.1%}")


def number(value: Mean) -> str:
    """A mean in nats."""
    return "not finite" if value.mean is None else f"{value.mean:.3f}"
