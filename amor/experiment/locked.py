"""Runs a command of `amor` while holding a file lock, so that no other study works on the same run.

    python -m amor.experiment.locked LOCK train RECIPE --out RUN ...

The lock belongs to this program, not to the study that started it: it is held until the command
ends, which it does soon after the study is killed.
"""

import runpy
import sys

from filelock import FileLock

from amor.experiment.jobs import end_with_parent


def main(words: list[str]) -> int:
    """Run the command; its exit code."""
    lock, *command = words
    end_with_parent()
    with FileLock(lock):
        sys.argv = ["amor", *command]
        runpy.run_module("amor", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
