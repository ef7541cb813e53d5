"""The threads of decode, one team per process (team.h; team.cpp: how they wait)."""

import ctypes
from functools import cache
from pathlib import Path

from amor.ops import native
from amor.threads import threads_are_ours

SOURCE = Path(__file__).with_name("team.cpp")


@cache
def library() -> ctypes.CDLL:
    """The compiled library."""
    loaded = native.library(SOURCE)
    loaded.team.restype = ctypes.c_void_p
    return loaded


def join(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Give the team to a library that uses team.h.

    Not where the environment sets how threads wait: OpenMP's threads are used there.
    """
    if threads_are_ours():
        loaded.join_team(ctypes.c_void_p(library().team()))
    return loaded
