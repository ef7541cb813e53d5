"""How OpenMP's threads wait for each other: they spin briefly, then sleep. Set before torch is imported, which
loads OpenMP.

Left as it comes, a thread that waits turns in place some hundred thousand times. On a quiet machine that is the fastest; beside
another program that takes a core, the thread that is waited for does not run while the others turn, and everything stands still.
Decode, whose pieces of work are too short to sleep between them, has threads of its own (ops/native/team.cpp).
Whoever says in the environment how threads should wait (VARIABLES) is left alone, in decode too; whoever imports torch before
amor has the waiting of torch.
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
    _ours = not given or given == [
        f"{OURS}={SPINS}"
    ]  # the second: set by amor in the process that started this one
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
