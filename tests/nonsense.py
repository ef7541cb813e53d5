"""Nonsense: valid files with one thing in them made wrong, for laws about broken files and for the
fuzzer (tests/fuzz.py).

`spoil(path, chance)` changes a file by its suffix: trees (JSON, JSON lines, TOML, the header of
safetensors), tensors, or bytes anywhere.
"""

import copy
import gzip
import json
import math
import random
import struct
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBERS = (0, 1, -1, 3, 2**31, 2**63, 2**64, 10**12, 10**30, -(2**63), 0.5, -0.5, 1e308, 1e-308)
TEXTS = (
    *("", "x", "mamba2", "../../etc/passwd", "/dev/null", "nan", "a\x00b", "ä" * 300, "{}"),
    *("\ud800", "1e400", "--", "<|endoftext|>", "\n"),
)
TREES: tuple[Any, ...] = (
    *([], {}, [[]], [None], [1, 2, 3], {"x": 1}, {"": None}, [0] * 1000, ["x", "x"]),
)
VALUES: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, *TREES)


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


def spoiled(tree: Any, chance: random.Random) -> Any:
    """The tree with one node replaced, removed, doubled or renamed.

    The depth of the node is drawn first: a vocabulary of thousands of words is one of the nodes
    beside the few that matter more.
    """
    places = list(nodes(tree))
    depth = chance.choice(sorted({len(path) for path in places}))
    path = chance.choice([path for path in places if len(path) == depth])
    if not path:
        return deep(chance) if chance.random() < 0.2 else chance.choice(VALUES)
    tree = copy.deepcopy(tree)
    above = tree
    for key in path[:-1]:
        above = above[key]
    key, what = path[-1], chance.random()
    if what < 0.7:
        above[key] = chance.choice(VALUES)
    elif what < 0.75:
        above[key] = deep(chance)
    elif what < 0.87:
        del above[key]
    elif isinstance(above, dict):
        name = chance.choice(["x", "", str(key) + "s", "version", "__class__"])
        above[name] = above.pop(key) if what < 0.95 else above[key]
    else:
        above.insert(key, above[key])
    return tree


def deep(chance: random.Random) -> Any:
    """A value inside many lists and tables."""
    tree: Any = 1
    for _ in range(chance.choice([10, 200, 900])):
        tree = [tree] if chance.random() < 0.5 else {"a": tree}
    return tree


ENDS = (b"", b"\xff\xfe", b"\0" * 1000, b"[" * 100_000, b'{"a":' * 50_000, b"null", b"NaN\n")
BITS = (b"NaN", b"Infinity", b"null", b"-1", b"1e999", b'"', b"}", b"\n", b"\xc3")


def scratched(given: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, doubled or replaced."""
    where, what = chance.randrange(len(given) + 1), chance.random()
    if what < 0.3:
        return given[:where]
    if what < 0.6:
        noise = bytes(chance.randrange(256) for _ in range(chance.choice([1, 8, 100])))
        return given[:where] + noise + given[where + 1 :]
    if what < 0.75:
        return given[:where] + given[where // 2 :]
    if what < 0.85:
        return chance.choice([*ENDS, b"\xef\xbb\xbf" + given])
    return given[:where] + chance.choice(BITS) + given[where:]


def spoil_bytes(path: Path, chance: random.Random) -> None:
    path.write_bytes(scratched(path.read_bytes(), chance))


def spoil_json(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.25:
        return spoil_bytes(path, chance)
    tree = spoiled(json.loads(path.read_text()), chance)
    path.write_text(json.dumps(tree), errors="surrogatepass")


def spoil_lines(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.25:
        return spoil_bytes(path, chance)
    lines = path.read_text().splitlines()
    number = chance.randrange(len(lines))
    lines[number] = json.dumps(spoiled(json.loads(lines[number]), chance))
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")


def spoil_toml(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.25:
        return spoil_bytes(path, chance)
    tree = spoiled(tomllib.loads(path.read_text()), chance)
    path.write_text(toml(tree if isinstance(tree, dict) else {"x": tree}), errors="replace")


def toml(tree: dict[str, Any]) -> str:
    """A tree as TOML, one line per key."""
    return "".join(f"{json.dumps(str(key))} = {toml_value(value)}\n" for key, value in tree.items())


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        inside = (f"{json.dumps(str(key))} = {toml_value(inner)}" for key, inner in value.items())
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps("" if value is None else value)


def spoil_packed(path: Path, chance: random.Random) -> None:
    """A .jsonl.gz: its lines, or the bytes of the archive."""
    if chance.random() < 0.2:
        return spoil_bytes(path, chance)
    lines = path.with_name("unpacked.jsonl")
    lines.write_bytes(gzip.decompress(path.read_bytes()))
    spoil_lines(lines, chance)
    path.write_bytes(gzip.compress(lines.read_bytes()))
    lines.unlink()


def spoil_pickle(path: Path, chance: random.Random) -> None:
    """Tensors that torch.save wrote (a zip file); any other .bin by its bytes."""
    import torch

    if chance.random() < 0.3 or not path.read_bytes().startswith(b"PK"):
        return spoil_bytes(path, chance)
    tensors: Any = torch.load(path)
    name = chance.choice(list(tensors))
    tensors[name] = respelled(tensors[name], chance)
    kept = {key: t for key, t in tensors.items() if t is not None}
    torch.save(kept if chance.random() < 0.9 else chance.choice(VALUES), path)


def spoil_safetensors(path: Path, chance: random.Random) -> None:
    """The header as a tree, its size, a tensor, a number, or bytes anywhere."""
    given = path.read_bytes()
    size = struct.unpack("<Q", given[:8])[0]
    header, body, what = json.loads(given[8 : 8 + size]), given[8 + size :], chance.random()
    if what < 0.4:
        if what < 0.1 and "__metadata__" in header:  # what this program wrote into it
            name = chance.choice(list(header["__metadata__"]))
            inner = spoiled(json.loads(header["__metadata__"][name]), chance)
            header["__metadata__"][name] = json.dumps(inner) if chance.random() < 0.8 else "{"
        else:
            header = spoiled(header, chance)
        words = json.dumps(header).encode()
        more = 0 if what < 0.35 else chance.choice([1, 2**40, 2**63 - 1 - len(words)])
        path.write_bytes(struct.pack("<Q", len(words) + more) + words + body)
    elif what < 0.6:
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        name = chance.choice(list(tensors))
        tensors[name] = respelled(tensors[name], chance)
        kept = {key: t.contiguous() for key, t in tensors.items() if t is not None}
        save_file(kept, path, header.get("__metadata__"))
    elif what < 0.8:
        number = struct.pack("<f", chance.choice([math.nan, math.inf, -math.inf, 1e38, -1e38]))
        where = chance.randrange(max(len(body) // 4, 1)) * 4
        path.write_bytes(given[: 8 + size] + body[:where] + number + body[where + 4 :])
    else:
        path.write_bytes(scratched(given, chance))


def respelled(t: Any, chance: random.Random) -> Any:
    """A tensor of another type, shape or size, or None."""
    import torch

    types = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64)
    changes: list[Callable[[], Any]] = [
        *(lambda to=to: t.to(to) for to in (*types, torch.bool, torch.complex64)),
        *(lambda by=by: t * by for by in (1e38, -1e38, 0)),
        *(lambda: None, t.flatten, lambda: t[:0], lambda: t[..., :1], lambda: t[None]),
        *(lambda: torch.cat([t, t]), lambda: t.transpose(0, -1)),
    ]
    try:
        return chance.choice(changes)()
    except (IndexError, RuntimeError):  # a scalar has no rows
        return None


SPOILERS: dict[str, Callable[[Path, random.Random], None]] = {
    ".json": spoil_json,
    ".jsonl": spoil_lines,
    ".toml": spoil_toml,
    ".gz": spoil_packed,
    ".bin": spoil_pickle,
    ".safetensors": spoil_safetensors,
}


def spoil(path: Path, chance: random.Random) -> None:
    """Make one thing in a file wrong."""
    SPOILERS.get(path.suffix, spoil_bytes)(path, chance)
