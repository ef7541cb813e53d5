"""A traced text for a page: one span per token, coloured where gates fired, with a readout for the
pointer.

The trace is that of amor/judge/trace.py. A token is coloured by what the gates did after reading
it, about the token after it.
"""

from collections.abc import Sequence

from amor.records.trace import Token, Trace
from amor.study.page import MarkedText, MarkedToken

SHADES = 4  # colour steps from one block fired to all of them


def marked_text(trace: Trace) -> MarkedText:
    """The text of a trace; the first `given` tokens are marked as not the model's own."""
    tokens = []
    for place, token in enumerate(trace.tokens):
        classes = f"t h{shade(token.fire)}" + (" given" if place < trace.given else "")
        tokens.append(
            MarkedToken(token.text.replace("\n", "⏎\n"), classes, tip(token, trace.thresholds))
        )
    return MarkedText(trace.title, tuple(tokens))


def shade(fired: Sequence[bool]) -> int:
    """0 where nothing fired, SHADES where every block did."""
    return -(-sum(fired) * SHADES // len(fired)) if fired else 0


def tip(token: Token, thresholds: Sequence[float | None]) -> str:
    """What is shown beside a token under the pointer."""
    lines = [f"read {token.text!r}"]
    if token.surprise is not None:
        lines[0] += f", surprise {token.surprise:.2f} nats"
    for block, (entropy, fired, threshold) in enumerate(
        zip(token.entropy, token.fire, thresholds, strict=True)
    ):
        level = "" if threshold is None else f", threshold {threshold:.3f}"
        lines.append(
            f"block {block}: entropy {entropy:.3f}{level}: {'fired' if fired else 'passed over'}"
        )
    guesses = ", ".join(f"{g.text!r} {g.p:.0%}" for g in token.guesses[:3])
    return "\n".join([*lines, f"next: {guesses}"])
