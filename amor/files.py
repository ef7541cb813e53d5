"""Files written whole: a reader, or a kill, meets the old one or the new one, never half of one.

What the system refuses (no room, no right, no such folder, a name it cannot hold) is the user's to mend, and told in one line.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amor.errors import AmorError


@contextmanager
def written(path: str | Path, advice: str = "") -> Iterator[None]:
    """Around whatever writes a path: what the system says against it becomes one line, with what to do."""
    if "\0" in str(path):
        raise AmorError(f"{str(path)!r} cannot be written (no name holds a NUL)")
    try:
        yield
    except OSError as error:
        why = "a file stands there" if isinstance(error, FileExistsError) else error.strerror or error
        words = f"{error.filename or path} cannot be written ({why})"
        raise AmorError(f"{words}; {advice}" if advice else words) from error


def file_to_write(path: str | Path) -> Path:
    """A file that can be written, its folder made: known before the work, not after it. What it holds stays."""
    path = Path(path)
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    return path


def folder_to_write(path: str | Path) -> Path:
    """A folder that can be written, made where it is missing: known before the work, not after it."""
    path = Path(path)
    with written(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


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


def free_folder(path: str | Path) -> Path:
    """A path where nothing stands yet but an empty folder: known before the work, not after it."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise AmorError(f"{path} holds something already; give another --out")
    return path


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill beside a path, which takes that name once all is in it and on the disk; on any error nothing is left."""
    path = free_folder(path)
    with written(path, "give another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.parent / f".{path.name}.{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            yield beside
            for file in sorted(beside.rglob("*")):
                to_disk(file)
            os.rename(beside, path)
            to_disk(path.parent)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
