"""Asked to stop: Ctrl-C and SIGTERM are remembered until the step is done; a second Ctrl-C does not wait."""

import signal
import threading
from types import FrameType
from typing import Any

import torch

from amor.train.distributed import World

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Remembers the signal that asked to stop, while it is entered; handlers live in the main thread only."""

    def __init__(self, world: World):
        self.world = world
        self.signal = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._heard) for number in WATCHED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def asked(self) -> bool:
        """Whether anyone in the world was asked; all get the same answer, so all stop after the same step."""
        heard = torch.tensor(float(self.signal), device=self.world.device)
        if not float(self.world.sum(heard)):
            return False
        self.signal = max(self.world.gather_objects(self.signal))
        return True

    @property
    def code(self) -> int:
        """The exit code a shell expects of a program stopped by this signal."""
        return 128 + self.signal

    @property
    def name(self) -> str:
        return signal.Signals(self.signal).name
