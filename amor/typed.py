"""Strictly typed files: text becomes a frozen type, or one AmorError naming file and key.

A type is a `File` (or a plain frozen dataclass) whose annotations give the allowed values, ranges
included (`Annotated[int, Meta(ge=1, le=CEILING)]`, or the names below). Nothing is guessed: an
unknown key, a text in place of a number, a number out of its range or a file of another version is
refused before anything is built from it. A type whose keys were renamed lists them in `RENAMED:
ClassVar[Mapping[str, str]]` (old -> new); a file that has an old one is refused with the new one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from amor.errors import AmorError, nearest

T = TypeVar("T")
MOST_BYTES = 64 << 20  # of one file of text that is read whole
MOST_LEVELS = 64  # of tables inside tables, far more than any file of ours has
MOST_BELOW = 16  # files that extend each other
MOST_DOTS = 16  # of a dotted key; none of ours has more than five
# keys whose value may be a table: {mamba2 = 12, attention = [4]} is one pattern
WHOLE = frozenset({"pattern"})
# 2**53: whole numbers up to here survive readers of JSON that hold floats
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Share = Annotated[float, Meta(ge=0, le=1)]  # a fraction
Name = Annotated[str, Meta(min_length=1, max_length=1024)]


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of file types. A change of format raises `newest`.

    `earlier` lists older versions that are still read.
    """

    newest: ClassVar[int] = 1
    earlier: ClassVar[tuple[int, ...]] = ()
    version: int = 1  # of the file


def convert(kind: type[T], value: Any, where: str) -> T:
    """Convert a tree of plain values (from JSON, TOML or Python) to a type.

    `where` names it in errors.
    """
    _known_keys(kind, value, where)
    try:
        result: T = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise AmorError(_format_error(where, error, value)) from None
    except UnicodeEncodeError as error:
        raise AmorError(f"{where}: {_lone_surrogate(error)}") from None
    except RecursionError:
        raise AmorError(f"{where}: nested too deeply") from None
    if isinstance(result, File) and result.version not in (result.newest, *result.earlier):
        raise AmorError(
            f"{where}: of version {result.version}; this amor reads version {result.newest}"
        )
    return result


def from_json(kind: type[T], text: str | bytes, where: str) -> T:
    """Parse JSON text and convert it to a type."""
    return convert(kind, json_tree(text, where), where)


def json_tree(text: str | bytes, where: str) -> Any:
    """Parse JSON text; NaN and infinity are refused."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AmorError(f"{where}: not JSON ({error})") from None
    except RecursionError:
        raise AmorError(f"{where}: nested too deeply") from None


def toml_tree(text: str, where: str) -> dict[str, Any]:
    """Parse TOML text; at most MOST_LEVELS tables inside each other."""
    try:
        tree = tomllib.loads(text)
    # a number of too many digits is a ValueError
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise AmorError(f"{where}: not TOML ({error})") from None
    except RecursionError:
        raise AmorError(f"{where}: nested too deeply") from None
    check_levels(tree, where)  # a dotted key nests without recursion, so nothing has stopped it yet
    return tree


def check_levels(tree: Any, where: str) -> None:
    """Refuse tables and lists nested more than MOST_LEVELS deep: libraries copy them by recursion,
    which ends in a RecursionError at a depth that their parsers take."""
    level = [tree]
    for _ in range(MOST_LEVELS):
        tables = [each.values() if isinstance(each, dict) else each for each in level]
        level = [inner for each in tables for inner in each if isinstance(inner, dict | list)]
    if level:
        raise AmorError(f"{where}: nested too deeply")


def toml_value(text: str) -> Any:
    """Parse one TOML value; text that is not TOML stays a string, so that names need no quotes."""
    try:
        return toml_tree(f"value = {text}", "")["value"]
    except AmorError:
        return text


def assignments(words: Iterable[str], example: str) -> dict[str, Any]:
    """The `--set` words of a command line, ["a.b=1", "c=true"] -> {"a.b": 1, "c": True}.

    Values are read as TOML.
    """
    out: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise AmorError(f"--set {word!r}: write it as key=value, e.g. --set {example}")
        out[key.strip()] = toml_value(value.strip())
    return out


def set_key(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in a tree of tables, making tables that are missing.

    A key that stands in a table spelled with its dots is replaced there.
    Tables on the way are copied, so that one the caller shares with others stays as it was. A wrong
    name makes a table of that name, which is refused when the tree is converted to its type.
    """
    whole = key
    if key.count(".") > MOST_DOTS:
        raise AmorError(f"{where}: no key {key[:80]!r}, of {key.count('.')} dots")
    while "." in key and key not in tree:
        head, _, key = key.partition(".")
        inner = tree.get(head, {})
        if not isinstance(inner, Mapping):
            raise AmorError(
                f"{where}: {head!r} is {inner!r} and has no keys, so {whole!r} reaches nothing"
            )
        tree[head] = dict(inner)
        tree = tree[head]
    tree[key] = value


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{"blocks": {"count": 1}} -> {"blocks.count": 1}; the table of a key in WHOLE is one value."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and name.rpartition(".")[2] not in WHOLE:
            out |= flat(value, f"{name}.")
        else:
            out[name] = value
    return out


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a whole UTF-8 file of at most `most` bytes."""
    try:
        if not path.is_file():
            raise AmorError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        if isinstance(error, AmorError):
            raise
        raise AmorError(f"{path}: cannot be read ({error})") from None
    if len(data) > most:
        raise AmorError(f"{path}: larger than {most >> 20} MB, which no file of this kind is")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AmorError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def read(kind: type[T], path: Path, most: int = MOST_BYTES) -> T:
    """Read a file of JSON, or of TOML if its name ends in .toml."""
    text = read_text(path, most)
    tree = toml_tree(text, str(path)) if path.suffix == ".toml" else json_tree(text, str(path))
    return convert(kind, tree, str(path))


def extended(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a TOML file merged over those that it `extends`: a path, or several.

    Of several the later ones win.
    """
    path = path.resolve()
    if path in seen:
        raise AmorError(f"{path} extends itself by way of {seen[-1]}")
    if len(seen) > MOST_BELOW:
        raise AmorError(f"{seen[0]} extends more than {MOST_BELOW} files, one upon the other")
    tree = toml_tree(read_text(path), str(path))
    bases = tree.pop("extends", [])
    below: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise AmorError(f"{path}: extends: {base!r} is not the path of a file")
        if not (path.parent / base).is_file():
            raise AmorError(f"{path} extends {base!r}, which is not there")
        below = _deep_merge(below, extended(path.parent / base, (*seen, path)))
    return _deep_merge(below, tree)


def _deep_merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees; where both have a value for a key, that of `top` wins."""
    out = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _deep_merge(out[key], value) if both else value
    return out


def read_lines(
    kind: type[T] | Callable[[Any], type[T]], path: Path, most: int = 1 << 30
) -> Iterator[T]:
    """Read a file of one JSON value per line; `kind` is their type, or chooses it by the value.

    A last line without a newline was cut off by a kill, and is left out.
    """
    whole, _, _cut = read_text(path, most).rpartition("\n")
    for number, line in enumerate(whole.split("\n"), 1):
        if line:
            where = f"{path}:{number}"
            value = json_tree(line, where)
            yield convert(kind if isinstance(kind, type) else kind(value), value, where)


def tree(thing: Any) -> Any:
    """A typed value as plain values, ready for JSON."""
    return msgspec.to_builtins(thing)


def text(thing: Any) -> str:
    """A typed value as the text of a JSON file: indented, keys in the order of their type."""
    return json.dumps(msgspec.to_builtins(thing), indent=2, allow_nan=False) + "\n"


def line(thing: Any) -> str:
    """A typed value as one line of JSON."""
    try:
        return msgspec.json.encode(thing).decode() + "\n"
    except UnicodeEncodeError as error:
        raise AmorError(f"not written: {_lone_surrogate(error)}") from None


def _lone_surrogate(error: UnicodeEncodeError) -> str:
    """What is wrong with text that JSON's \\ud800 can spell and UTF-8 cannot."""
    return f"text with a lone surrogate, {error.object[error.start]!a}, which UTF-8 lacks"


def _format_error(where: str, error: Exception, value: Any) -> str:
    """msgspec's message with the place in front.

    "Expected `int` >= 1 - at `$.a[0]`" -> "FILE: a[0]: expected int >= 1, not 0"
    """
    words, _, place = str(error).partition(" - at ")
    path = place.strip("`").removeprefix("key in ").strip("`").removeprefix("$").removeprefix(".")
    words = words.replace("`", "")
    if words.endswith("got type"):
        words += "; give the path of the class as a text, 'module.Class'"
    if re.search(r"[<>]=? \S+$", words):  # a range; msgspec does not name the value outside it
        words += _given(path, value)
    return f"{where}: {path + ': ' if path else ''}{words[:1].lower()}{words[1:]}"


def _given(path: str, value: Any) -> str:
    """Text ", not VALUE" for the number at a path such as "a[0].b".

    Empty where there is no number, or it is too long to print.
    """
    for step in re.findall(r"[^.\[\]]+", path):
        inside = value.get(step) if isinstance(value, Mapping) else None
        value = (
            value[int(step)]
            if isinstance(value, list | tuple) and step.isdecimal() and int(step) < len(value)
            else inside
        )
    return (
        f", not {value:.12g}"
        if isinstance(value, int | float) and not abs(value) >= 2**1000
        else ""
    )


def _known_keys(kind: Any, value: Any, where: str, path: str = "") -> None:
    """Refuse unknown keys with the nearest one, and renamed keys with the new name.

    msgspec ignores unknown keys of a dataclass, and suggests nothing.
    """
    for option in _options(kind):
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                _known_keys(
                    get_args(option)[0], inner, where, f"{path.removesuffix('.')}[{number}]."
                )
            return
        fields = _fields(option)
        if fields is None or not isinstance(value, Mapping):
            continue
        for key, inner in value.items():
            if now := getattr(option, "RENAMED", {}).get(key):
                raise AmorError(f"{where}: {path}{key} is now {now}")
            if key not in fields:
                raise AmorError(f"{where}: {path}no key {key!r}; {nearest(str(key), fields)}")
            _known_keys(fields[key], inner, where, f"{path}{key}.")
        return


def _options(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


@cache
def _fields(kind: Any) -> dict[str, Any] | None:
    """The keys of a type as files spell them, with their types; None for a type without keys."""
    if not isinstance(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        names = {f.name: f.name for f in dataclasses.fields(kind)}
    elif issubclass(kind, msgspec.Struct):
        if not kind.__struct_config__.forbid_unknown_fields:
            return None  # a view: it reads a part of a file
        names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__))
    else:
        return None
    hints = get_type_hints(kind, include_extras=True)
    return {written: hints[name] for written, name in names.items()}
