"""Compares structs and numbers of Python with those of C++ (layout.h) as a library is loaded."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from amor.errors import AmorError


def agree(
    loaded: ctypes.CDLL,
    structs: Sequence[type[ctypes.Structure]],
    numbers: Mapping[str, int],
    source: Path,
) -> None:
    """Refuse a library whose structs or numbers differ: it would read other memory."""
    here = {name: words for struct in structs for name, words in layout(struct).items()}
    here |= {name: str(value) for name, value in numbers.items()}
    there = {}
    if hasattr(loaded, "layout"):
        loaded.layout.restype = ctypes.c_char_p
        there = dict(line.split(" = ", 1) for line in loaded.layout().decode().splitlines())
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            theirs, ours = there.get(name, "missing"), here.get(name, "missing")
            differs = f"{name} is {theirs} in C++ and {ours} in Python"
            raise AmorError(f"native code {source.name} does not fit its Python: {differs}")


def layout(struct: type[ctypes.Structure]) -> dict[str, str]:
    """Size and offset of every field, in the words of layout.h.

    A struct is named as in C++, or with an underscore before or Struct behind it.
    """
    name, fields = struct.__name__.removesuffix("Struct").removeprefix("_"), {}
    for field, kind, *_ in struct._fields_:
        place = getattr(struct, field)
        fields[f"{name}.{field}"] = f"{_kind(kind)} of {place.size} bytes at {place.offset}"
    return fields | {name: f"{ctypes.sizeof(struct)} bytes"}


def _kind(kind: type) -> str:
    if issubclass(kind, ctypes.Structure):
        return "struct"
    if issubclass(kind, ctypes.c_void_p):
        return "pointer"
    return "float" if issubclass(kind, ctypes.c_float | ctypes.c_double) else "integer"
