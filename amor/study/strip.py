"""A text with the tokens marked where gates fired: coloured HTML with a readout, or a strip for a terminal.

A token carries what the gates did when it was predicted, that is after reading the token before it:
{"text", "scores": [one a block], "fired": [0 or 1 a block], "nll"}.
"""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

SHADES = 4  # colour steps from one block fired to all of them
TERMINAL = ("", "on #4a2350", "on #7a2f7f", "on #b040b0")


def as_html(tokens: Sequence[dict[str, Any]], thresholds: Sequence[float | None], prompt: int = 0) -> str:
    """One <span> a token; `prompt`: how many tokens were given, not written."""
    return f'<p class="strip">{"".join(_span(t, thresholds, i < prompt) for i, t in enumerate(tokens))}</p>'


def _span(token: dict[str, Any], thresholds: Sequence[float | None], given: bool) -> str:
    text = escape(token["text"]).replace("\n", "⏎\n")
    shade = shade_of(token["fired"])
    classes = f"t h{shade}" + (" given" if given else "")
    return f'<span class="{classes}" data-tip="{escape(tip(token, thresholds), quote=True)}">{text}</span>'


def shade_of(fired: Sequence[int], steps: int = SHADES) -> int:
    """0 where nothing fired, `steps` where every block did."""
    return -(-sum(fired) * steps // len(fired)) if fired else 0


def tip(token: dict[str, Any], thresholds: Sequence[float | None]) -> str:
    """What is shown beside a token under the pointer."""
    lines = [repr(token["text"])]
    for block, (score, fired) in enumerate(zip(token["scores"], token["fired"])):
        level = thresholds[block]
        against = "" if level is None else f" {'>' if score > level else '≤'} τ {level:.3f}"
        lines.append(f"block {block}: {score:.3f}{against}" + (", fired" if fired else ""))
    if token["nll"] is not None:
        lines.append(f"surprise {token['nll']:.2f} nats")
    return "\n".join(lines)


def as_text(tokens: Sequence[dict[str, Any]], prompt: int = 0) -> "Text":
    """The same for a terminal: the background deepens with the number of blocks that fired, the prompt is dim."""
    from rich.text import Text

    strip = Text()
    for index, token in enumerate(tokens):
        shade = shade_of(token["fired"], len(TERMINAL) - 1)
        # a line feed would paint the rest of the line
        words = token["text"].replace("\n", " ")
        strip.append(words, style=" ".join(filter(None, ("dim" if index < prompt else "", TERMINAL[shade]))))
    return strip


def as_marks(tokens: Sequence[dict[str, Any]]) -> str:
    """The same without colour: a token at which most blocks fired stands in brackets."""
    return "".join(
        f"[{t['text']}]" if t["fired"] and 2 * sum(t["fired"]) > len(t["fired"]) else t["text"] for t in tokens
    ).replace("\n", " ")
