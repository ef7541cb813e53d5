"""The peak memory of a piece of work, beyond what was in use before it."""

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process in main memory now; VmHWM: the most there ever were."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {field}")


def release_freed() -> None:
    """Hand freed memory back to the system; otherwise the next piece of work would reuse it
    without being charged for it."""
    gc.collect()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)


def extra_peak(work: Callable[[], Any]) -> int | None:
    """Bytes in use at the peak of `work` beyond those in use now, its result included; None where
    the system does not report memory.

    Linux keeps a high-water mark that can be reset, so no moment is missed; where it cannot be
    reset, a thread samples every millisecond.
    """
    if not STATUS.exists():
        return None
    release_freed()
    try:
        CLEAR.write_text("5")
    except OSError:
        return _sampled(work)
    before = resident()
    result = work()
    peak = resident("VmHWM")
    del result
    return max(0, peak - before)


def _sampled(work: Callable[[], Any]) -> int:
    before = most = resident()
    done = threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    result = work()
    done.set()
    watcher.join()
    del result
    return max(0, most - before)
