"""What the `amor` command asks of its own process. A program that imports amor decides for itself."""

import ctypes
import sys

TRIM, MMAP = -1, -3  # of mallopt(3): how much free memory is kept, and from which size on memory is asked of the system
KEPT = 256 << 20
LARGEST = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Memory given back is kept for the next layer: asked of the system anew it comes page by page, filled with zeros."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(TRIM, KEPT)
        mallopt(MMAP, LARGEST)
