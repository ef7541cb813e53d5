"""Atomic writes: a reader, or a kill, finds the old file or the new one, never half of one.

An OSError while writing (disk full, no permission, no such folder, an impossible name) is the
user's to mend, and becomes an AmorError of one line.
"""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from amor.errors import AmorError


@contextmanager
def disk_errors(path: str | Path, advice: str = "") -> Iterator[None]:
    """Turn an OSError raised while writing `path` into a one-line AmorError ending in `advice`."""
    if "\0" in str(path):
        raise AmorError(f"{str(path)!r} cannot be written (no name holds a NUL)")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise AmorError(f"{str(path)!r} cannot be written (half of a surrogate pair)") from None
    try:
        yield
    except OSError as error:
        why = (
            "a file stands there" if isinstance(error, FileExistsError) else error.strerror or error
        )
        words = f"{error.filename or path} cannot be written ({why})"
        raise AmorError(f"{words}; {advice}" if advice else words) from error


def file_to_write(path: str | Path) -> Path:
    """Check before the work that a file can be written, and make its folder.

    An existing file is left as it is.
    """
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    return path


def folder_to_write(path: str | Path) -> Path:
    """Check before the work that a folder can be written, and make it where it is missing."""
    path = Path(path)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


@contextmanager
def atomic_write(path: Path, mark: str = "") -> Iterator[Path]:
    """A temporary path to write to; at the end it is synced to disk and renamed to `path`.

    mark: keeps apart writers of the same file at the same time; by default the process id. A writer
    that is always alone gives a mark of its own, so that its next write replaces what a kill has
    left.
    """
    beside = path.with_name(f".{path.name}.{mark or os.getpid()}")
    try:
        yield beside
        fsync(beside)
        os.replace(beside, path)
    except Exception:
        beside.unlink(missing_ok=True)
        raise


def replace_file(path: Path, text: str, mark: str = "") -> None:
    """Write a text file atomically."""
    with atomic_write(path, mark) as beside:
        beside.write_text(text, encoding="utf-8")


def fsync(path: Path) -> None:
    """Return once a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_empty(path: str | Path) -> Path:
    """Refuse a path where anything but an empty folder stands, before the work."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise AmorError(f"{path} holds something already; give another --out")
    return path


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `path` once every file in it is on the disk.

    On any error it is removed.
    """
    path = require_empty(path)
    with disk_errors(path, "give another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.parent / f".{path.name}.{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            yield beside
            for file in sorted(beside.rglob("*")):
                fsync(file)
            os.rename(beside, path)
            fsync(path.parent)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


@contextmanager
def locked(folder: str | Path, name: str, command: str) -> Iterator[None]:
    """Keep a second `command` out of a folder while this one writes it.

    The operating system releases the lock when the process ends, however it ends, so the lock of a
    killed process is taken over. Process id and host are written into the lock file FOLDER/name,
    for the message that refuses the second command.
    """
    path = Path(folder) / name
    lock = FileLock(path)
    with disk_errors(path):
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            owner = path.read_text(errors="replace")[:200].strip() or "a process without a name"
            raise AmorError(
                f"another `{command}` is writing {folder} ({owner}); "
                "wait for it, end it, or choose another --out"
            ) from None
    try:
        with disk_errors(path):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
    finally:
        lock.release()
