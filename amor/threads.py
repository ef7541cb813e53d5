"""How threads wait for each other: they look some times, then sleep. OpenMP is told before torch is imported, which loads it.

Left as it comes, a thread that waits turns in place some hundred thousand times. On a quiet machine that is the fastest; beside
another program that takes a core, the thread that is waited for does not run while the others turn, and everything stands still.
Whoever says in the environment how threads should wait (VARIABLES), or imports torch before amor, is left alone.
"""

import os
import sys

SPINS = 2000  # turns before a thread sleeps
OURS = "GOMP_SPINCOUNT"
VARIABLES = ("OMP_WAIT_POLICY", OURS, "KMP_BLOCKTIME")

_waiting = "as it came"


def set_waiting() -> None:
    """Called once, when amor is imported. Programs that are started from here inherit it."""
    global _waiting
    given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    if "torch" in sys.modules:
        _waiting = f"as it came: torch was imported before amor{''.join(f', {words}' for words in given)}"
    elif given:
        _waiting = f"as the environment says: {', '.join(given)}"
    else:
        os.environ[OURS] = str(SPINS)
        _waiting = f"spin {SPINS} turns, then sleep ({OURS}, set by amor)"


def waiting() -> str:
    """How the threads of this process wait, and who said so."""
    return _waiting
