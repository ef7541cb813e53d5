"""Finds the class of a kind: in amor/<package>/<kind>.py, or elsewhere by its dotted path."""

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from amor.errors import AmorError, nearest


@cache
def kinds(package: str) -> tuple[str, ...]:
    """Every kind of a subpackage, sorted: its modules that define a class of that `kind`."""
    paths = importlib.import_module(f"amor.{package}").__path__
    modules = [m.name for m in pkgutil.iter_modules(paths) if not m.name.startswith("_")]
    return tuple(sorted(name for name in modules if _class_in(f"amor.{package}.{name}", name)))


@cache
def find(package: str, kind: str, has: str = "Options") -> type[Any]:
    """The class of a kind of a subpackage ("mixers", "gates", ...).

    kind: the name of a module there, or package.module.Class of a class that lives elsewhere.
    has: an attribute that such a class must have.
    Callers that may import the subpackage use its typed finder: `find_mixer`, `find_gate`,
    `layout_of`.
    """
    if "." in kind:
        module, _, name = kind.rpartition(".")
        if not all(word.isidentifier() for word in kind.split(".")):
            raise AmorError(f"{package}: {kind!r} is no path of a class; give package.module.Class")
        try:
            outside = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise AmorError(
                f"{package}: cannot import {kind!r} ({error}); give package.module.Class"
            ) from error
        if not isinstance(outside, type) or not hasattr(outside, has):
            raise AmorError(
                f"{package}: {kind!r} is not a class with {has}, as those of amor/{package} are"
            )
        return outside
    if kind not in kinds(package):
        raise AmorError(f"{package}: no kind {kind!r}; {nearest(kind, kinds(package))}")
    own = _class_in(f"amor.{package}.{kind}", kind)
    assert own is not None
    return own


def _class_in(module: str, kind: str) -> type | None:
    for _, member in inspect.getmembers(importlib.import_module(module), inspect.isclass):
        if member.__module__ == module and getattr(member, "kind", None) == kind:
            return member
    return None
