"""Finds the class of a kind: in amor/<room>/<kind>.py, or by its path outside the package."""

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from amor.errors import AmorError, nearest


@cache
def kinds(room: str) -> tuple[str, ...]:
    """Every kind of a room, sorted: its modules that define a class of that `kind`."""
    package = importlib.import_module(f"amor.{room}")
    modules = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    return tuple(sorted(name for name in modules if _class_in(f"amor.{room}.{name}", name)))


@cache
def find(room: str, kind: str, has: str = "Options") -> type[Any]:
    """The class of a kind; `package.module.Class` reaches one that lives elsewhere,
    if it has the attribute `has`.

    Callers that may import the room use its typed finder instead: `find_mixer`, `find_gate`,
    `layout_of`.
    """
    if "." in kind:
        module, _, name = kind.rpartition(".")
        if not all(word.isidentifier() for word in kind.split(".")):
            raise AmorError(f"{room}: {kind!r} is no path of a class; give package.module.Class")
        try:
            outside = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise AmorError(
                f"{room}: cannot import {kind!r} ({error}); give package.module.Class"
            ) from error
        if not isinstance(outside, type) or not hasattr(outside, has):
            raise AmorError(
                f"{room}: {kind!r} is not a class with {has}, as those of amor/{room} are"
            )
        return outside
    if kind not in kinds(room):
        raise AmorError(f"{room}: no kind {kind!r}; {nearest(kind, kinds(room))}")
    found = _class_in(f"amor.{room}.{kind}", kind)
    assert found is not None
    return found


def _class_in(module: str, kind: str) -> type | None:
    for _, member in inspect.getmembers(importlib.import_module(module), inspect.isclass):
        if member.__module__ == module and getattr(member, "kind", None) == kind:
            return member
    return None
