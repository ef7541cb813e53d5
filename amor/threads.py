"""How OpenMP's threads wait for each other: they spin briefly, then sleep.

Set before torch is imported, which loads OpenMP. By default a waiting thread spins some hundred
thousand turns. On a quiet machine that is the fastest; beside another program that takes a core,
the thread that is waited for does not run while the others spin, and everything stands still.
Decode, whose pieces of work are too short to sleep between them, has threads of its own
(ops/native/team.cpp). An environment that sets how threads wait (VARIABLES) is respected, in decode
too; a program that imports torch before amor keeps the defaults of torch.
"""

import os
import sys

SPINS = 6000  # turns before a thread sleeps
OURS = "GOMP_SPINCOUNT"
VARIABLES = ("OMP_WAIT_POLICY", OURS, "KMP_BLOCKTIME")

_waiting = "as it came"
_ours = True


def set_waiting() -> None:
    """Called once, when amor is imported. Programs that are started from here inherit it."""
    global _waiting, _ours
    given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    # the second: set by amor in the process that started this one
    _ours = not given or given == [f"{OURS}={SPINS}"]
    if "torch" in sys.modules:
        _waiting = (
            f"as it came: torch was imported before amor{''.join(f', {words}' for words in given)}"
        )
    elif given:
        _waiting = f"as the environment says: {', '.join(given)}"
    else:
        os.environ[OURS] = str(SPINS)
        _waiting = f"spin {SPINS} turns, then sleep ({OURS}, set by amor)"


def threads_are_ours() -> bool:
    """Whether decode may use its own threads: no environment variable sets how threads wait."""
    return _ours


def waiting() -> str:
    """How the threads of this process wait, and which setting decided it."""
    return f"{_waiting}; decode has threads of its own" if _ours else _waiting
