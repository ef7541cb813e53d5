"""Weights in huge pages: the same memory, with fewer lookups of addresses (TLB misses).

A decode step reads every weight once, so each page of 4 KB is looked up anew; on a virtual machine
that costs about a fifth of the bandwidth (measured: 30 GB/s in small pages, 37 in huge ones). Linux
can gather memory in use into pages of 2 MB without moving an address. Where it cannot (before 6.1,
or another system) nothing changes but the speed, and a line is logged.
"""

import ctypes
import logging
import sys
from collections.abc import Iterable

from torch import Tensor

log = logging.getLogger("amor")
PAGE = 2**21  # bytes
GAP = 2**16  # bytes that an allocator may leave between two weights
HUGEPAGE, COLLAPSE = 14, 25  # advice of madvise(2): may be large, make it large now


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Gather the memory of CPU tensors into huge pages; returns the bytes that were gathered."""
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
    """Addresses (start, end) of tensors, in order; neighbours as one."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted({(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors}):
        if runs and start - runs[-1][1] <= GAP:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((start, end))
    return runs


def whole_pages(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The addresses of the huge pages that lie inside each run, if any."""
    inside = ((-(-start // PAGE) * PAGE, end // PAGE * PAGE) for start, end in runs)
    return [(start, end) for start, end in inside if start < end]
