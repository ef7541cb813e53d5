"""What a model recalls of a task, as lines for people."""

from amor.records.recall import Mean, Recall


def lines(found: Recall) -> list[str]:
    options = ", ".join(f"{key} {value}" for key, value in found.task.items() if key != "kind")
    told = [
        f"{found.model} on {found.task['kind']} ({options})",
        f"  asked        {found.questions} questions of {found.answers // found.questions} tokens "
        f"in each of {found.rows:,} rows",
        f"  right        {share(found.token)} of their tokens (by chance {found.chance:.1%}), "
        f"{share(found.whole)} of them whole",
        f"  nats         {number(found.nll_questions)} per token of an answer, "
        f"{number(found.nll_elsewhere)} elsewhere",
        f"  state        {found.state.fixed:,} numbers, and {found.state.a_token:,} for each "
        "token read",
        *([f"  gate         {found.gate}"] if found.gate else []),
    ]
    for index, block in enumerate(found.blocks):
        told.append(
            f"  block {index}      fires on {block.questions:.1%} of the questions, "
            f"{block.elsewhere:.1%} elsewhere"
        )
    return told


def share(value: Mean) -> str:
    if value.mean is None:
        return "-"
    return f"{value.mean:.1%}" + ("" if value.se is None else f" ± {value.se:.1%}")


def number(value: Mean) -> str:
    return "not finite" if value.mean is None else f"{value.mean:.3f}"
