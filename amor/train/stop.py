"""Stop requests: SIGINT and SIGTERM wait until the step is done; a second Ctrl-C does not."""

import signal
import threading
from types import FrameType
from typing import Any

import torch

from amor.train.distributed import World

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Handles the stop signals while it is entered, if that is in the main thread."""

    def __init__(self, world: World):
        self.world = world
        self.signal = 0  # the number of the signal that came; 0: none
        self.before: dict[int, Any] = {}  # the handlers to restore

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._handle) for number in WATCHED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def requested(self) -> bool:
        """Whether any rank got a signal; the same on every rank, so that all stop after the same
        step.
        """
        came = torch.tensor(float(self.signal), device=self.world.device)
        if not float(self.world.sum(came)):
            return False
        self.signal = max(self.world.gather_objects(self.signal))
        return True

    @property
    def code(self) -> int:
        """The exit code a shell expects of a program stopped by this signal."""
        return 128 + self.signal

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        return signal.Signals(self.signal).name
