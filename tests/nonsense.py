"""Trees of plain values and the places in them, for laws about files that hold nonsense."""

import copy
from collections.abc import Iterator
from typing import Any


def nodes(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every node."""
    yield path
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inside:
        yield from nodes(value, (*path, key))


def replaced(tree: Any, path: tuple, value: Any) -> Any:
    """The tree with another value at a place."""
    if not path:
        return value
    tree = copy.copy(tree)
    tree[path[0]] = replaced(tree[path[0]], path[1:], value)
    return tree
