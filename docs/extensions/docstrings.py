"""Docstrings for the site: arguments as a list, and comments of fields as their documentation.

The package writes arguments as lines `name: meaning` and documents fields by a comment beside or
above them; both are readable in the source and would run together on a page.
"""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^[a-z_]+(?:, [a-z_]+)*: \S")


def listed(text: str) -> str:
    """A docstring whose argument lines are items of a list, with their continuation lines."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if ARGUMENT.match(line):
            name, _, meaning = line.partition(": ")
            if not inside:
                lines.append("")
            lines.append(f"- `{name}`: {meaning}")
            inside = True
        else:
            inside = inside and line.startswith(" ")
            lines.append(f"  {line.strip()}" if inside else line)
    return "\n".join(lines)


def comment_of(source: list[str], number: int) -> str:
    """The comment on line `number` (from 1), or the comment lines directly above it."""
    _, _, beside = source[number - 1].partition("  # ")
    above: list[str] = []
    while not beside and number > 1 and source[number - 2].strip().startswith("# "):
        above.insert(0, source[number - 2].strip().removeprefix("# "))
        number -= 1
    return beside or " ".join(above)


class Docstrings(griffe.Extension):
    """Rewrites docstrings as griffe loads them."""

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            func.docstring.value = listed(func.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring or not attr.lineno or not attr.parent or not attr.parent.is_class:
            return
        comment = comment_of(attr.filepath.read_text().splitlines(), attr.lineno)
        if comment:
            attr.docstring = griffe.Docstring(comment[0].upper() + comment[1:] + ".", parent=attr)
