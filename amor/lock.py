"""One writer per folder: a file lock that ends with its process, and that names its owner."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from amor.errors import AmorError
from amor.files import disk_errors


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
