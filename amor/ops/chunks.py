"""How many tokens a chunk of a recurrence holds.

AMOR_CHUNK forces it ("64", or "scan=64,delta=32"). Else the choice that `amor doctor --measure`
stored for this processor, thread count and shape is taken, else the table below. A run never
measures by itself, so two runs on one machine compute the same bits. Another chunk rounds
otherwise, so a run should not be resumed across a measurement if its bits matter.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta

from amor import typed
from amor.errors import AmorError
from amor.files import replace_file
from amor.ops import native

# The best of CHOICES at the 180M shape (T = 1024, forward and backward) on a two-core AVX2 machine.
# Around it the curve is flat: 32 to 128 differ by less than a tenth for scan, a third for delta.
DEFAULT = {
    ("scan", "native"): 64,
    ("scan", "chunked"): 64,
    ("delta", "native"): 48,
    ("delta", "chunked"): 64,
}
CHOICES = (16, 32, 48, 64, 96, 128)
MULTIPLE = 16  # native code works on whole vectors
LARGEST = 256  # MAX_CHUNK in native/decays.h
Chunk = Annotated[int, Meta(ge=MULTIPLE, le=LARGEST, multiple_of=MULTIPLE)]


def chunk_size(op: str, backend: str, length: int, shape: tuple[int, ...]) -> int:
    """The chunk for a call of `length` tokens; shape is (heads, size, size)."""
    wanted = (
        forced(os.environ.get("AMOR_CHUNK", "")).get(op)
        or stored().get(key(op, backend, shape))
        or DEFAULT[op, backend]
    )
    return min(wanted, -(-length // MULTIPLE) * MULTIPLE)


@cache
def forced(text: str) -> dict[str, int]:
    """AMOR_CHUNK as operator -> chunk."""
    chosen: dict[str, int] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        op, _, size = word.rpartition("=")
        if (
            op not in ("", "scan", "delta")
            or not size.isdigit()
            or not 0 < int(size) <= LARGEST
            or int(size) % MULTIPLE
        ):
            raise AmorError(
                f"AMOR_CHUNK: {word!r} is not a multiple of {MULTIPLE} up to {LARGEST}; "
                "write 64 or scan=64,delta=32"
            )
        chosen |= {name: int(size) for name in ([op] if op else ["scan", "delta"])}
    return chosen


def key(op: str, backend: str, shape: tuple[int, ...]) -> str:
    """What a stored chunk depends on: operator, backend, shape, threads and processor."""
    sizes, threads = "x".join(map(str, shape)), torch.get_num_threads()
    return f"{op} {backend} {sizes} threads={threads} {native.processor_name()}"


def path() -> Path:
    """The file of stored chunks, in the user's cache folder."""
    return native.cache_folder() / "chunks.json"


class Stored(typed.File, frozen=True):
    """The fastest chunks measured on this machine, by `key`."""

    chunks: dict[str, Chunk]


@cache
def stored() -> dict[str, int]:
    """The contents of the file; earlier files hold the chunks alone, without a version."""
    if not path().exists():
        return {}
    tree = typed.json_tree(typed.read_text(path()), str(path()))
    try:
        return typed.convert(
            Stored,
            tree if isinstance(tree, dict) and "chunks" in tree else {"chunks": tree},
            str(path()),
        ).chunks
    except AmorError as error:
        raise AmorError(
            f"{error}; delete the file, and amor doctor --measure writes it again"
        ) from None


def measure(
    op: str, backend: str, shape: tuple[int, ...], run: Callable[[int], object], rounds: int = 5
) -> dict[int, float]:
    """Time run(chunk) for every choice, in turns, and store the fastest for this machine.

    Returns the seconds of each, the best of `rounds`.
    """
    best = dict.fromkeys(CHOICES, float("inf"))
    for _ in range(rounds):
        for chunk in CHOICES:
            began = time.perf_counter()
            run(chunk)
            best[chunk] = min(best[chunk], time.perf_counter() - began)
    keep(op, backend, shape, min(best, key=lambda chunk: best[chunk]))
    return best


def keep(op: str, backend: str, shape: tuple[int, ...], chunk: int) -> None:
    """Store a chunk for this and every later process; those of other keys stay."""
    native.make_cache_folder(path().parent)
    stored.cache_clear()
    replace_file(path(), typed.text(Stored(chunks=stored() | {key(op, backend, shape): chunk})))
    stored.cache_clear()
