"""The threads of decode, one team a process: team.h tells what they are for, team.cpp how they wait."""

import ctypes
from functools import cache
from pathlib import Path

from amor.ops import native
from amor.threads import threads_are_ours

SOURCE = Path(__file__).with_name("team.cpp")


@cache
def library() -> ctypes.CDLL:
    found = native.library(SOURCE)
    found.team.restype = ctypes.c_void_p
    return found


def join(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """A library that uses team.h, with the team; without it where the environment says how threads should wait."""
    if threads_are_ours():
        loaded.join_team(ctypes.c_void_p(library().team()))
    return loaded
