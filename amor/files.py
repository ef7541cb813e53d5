"""Files written whole: a reader, or a kill, meets the old one or the new one, never half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, mark: str = "") -> Iterator[Path]:
    """A place beside a file to write to; once it is on the disk, what was written there takes the file's place.

    mark: tells apart those who write the same file at the same time, by default processes. A writer that is alone gives one
    of its own, so that what a kill has left is taken by the next write.
    """
    beside = path.with_name(f".{path.name}.{mark or os.getpid()}")
    try:
        yield beside
        to_disk(beside)
        os.replace(beside, path)
    except Exception:
        beside.unlink(missing_ok=True)
        raise


def replace_file(path: Path, text: str, mark: str = "") -> None:
    with replacing(path, mark) as beside:
        beside.write_text(text, encoding="utf-8")


def to_disk(path: Path) -> None:
    """A file or folder is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
