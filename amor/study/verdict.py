"""Gate value accounting (amor/judge/value.py) in sentences: what the numbers say, good or poor."""

from amor.records.value import Gains, Value
from amor.study.page import percents

FEW = 2.0  # standard errors below which a difference is within the noise


def sentences(value: Value) -> list[str]:
    """The whole account."""
    return [*main_sentences(value), *order_sentences(value)]


def main_sentences(value: Value) -> tuple[str, ...]:
    """What attention and the gate save."""
    return attention(value), gate(value), against_random(value)


def order_sentences(value: Value) -> tuple[str, ...]:
    """Whether entropy orders the tokens as their gains do, block by block."""
    return tuple(order(gains) for gains in value.gains[:-1])


def attention(value: Value) -> str:
    """Whether there is anything to gate."""
    always, never = value.losses.always, value.losses.never
    gain = f"{always.saved:+.4f} ± {always.saved_se:.4f} nats per token"
    saved = f"{gain} over never firing ({never.nll:.4f})"
    if not clear(always.saved, always.saved_se):
        none = f"attention everywhere cannot be told from none, {saved}"
        return f"Poor: {none}; the gate has little to choose from."
    if always.saved < 0:
        return f"Poor: attention everywhere makes the model worse, {saved}."
    return f"Attention everywhere gains {saved}."


def gate(value: Value) -> str:
    """What share of the oracle's saving the gate has, at the same count."""
    mine, best = value.losses.gate, value.losses.oracle
    gain = f"{mine.saved:+.4f} ± {mine.saved_se:.4f} nats per token"
    text = f"the gate fires on {percents(mine.fire_rate)} of tokens and gains {gain}"
    if not any(mine.fire_rate):
        return "Poor: the gate fires nowhere on this text."
    if best.saved <= 0:
        return f"Poor: {text}; not even the oracle gains at this rate."
    share = mine.saved / best.saved
    level = "Poor" if share < 0.25 else "Against the oracle"
    of_best = f"{100 * share:.0f} % of what the best choice of as many tokens gains"
    return f"{level}: {text}, {of_best} ({best.saved:+.4f})."


def against_random(value: Value) -> str:
    """Whether choosing by entropy is better than choosing blindly."""
    mine, blind = value.losses.gate, value.losses.random
    better = mine.saved - blind.saved
    text = f"the same number of random tokens gains {blind.saved:+.4f}"
    error = value.losses.gate.over_random_se
    worth = f"{better:+.4f} ± {error:.4f}"
    if not clear(better, error):
        return f"Poor: {text}, which cannot be told from the gate's (difference {worth})."
    if better < 0:
        return f"Poor: {text}, more than the gate's choice (difference {worth})."
    return f"Against chance: {text}, so choosing by the gate is worth {worth} nats per token."


def order(block: Gains) -> str:
    """The rank correlation of entropy and gain of one block."""
    rho = block.rank_correlation
    if rho is None:
        return f"{block.name}: entropy or gain is the same for all tokens."
    helps = f"firing helps {100 * block.positive:.0f} % of tokens"
    found = f"{block.name}: rank correlation of entropy and gain {rho:+.2f}; {helps}."
    return f"Poor: {found}" if rho < 0.1 else found


def clear(difference: float, error: float) -> bool:
    """Whether a difference is more than noise: beyond FEW standard errors."""
    return abs(difference) > FEW * error
