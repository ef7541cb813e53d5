"""AMOR: a language model that pays for attention only where it is unsure."""

import importlib
from typing import TYPE_CHECKING, Any

from amor.errors import AmorError
from amor.threads import set_waiting

if TYPE_CHECKING:
    from amor.config import Config
    from amor.decode.engine import Engine
    from amor.decode.generate import generate, generate_batch
    from amor.decode.sample import Sampling
    from amor.models.build import build
    from amor.models.folder import load, save
    from amor.presets import preset
    from amor.state import State

set_waiting()  # before anything here imports torch

__version__ = "0.1.0"
__all__ = [
    "AmorError",
    "Config",
    "Engine",
    "Sampling",
    "State",
    "build",
    "generate",
    "generate_batch",
    "load",
    "preset",
    "save",
]

_HOMES = {
    "Config": "amor.config",
    "Engine": "amor.decode.engine",
    "Sampling": "amor.decode.sample",
    "State": "amor.state",
    "build": "amor.models.build",
    "generate": "amor.decode.generate",
    "generate_batch": "amor.decode.generate",
    "load": "amor.models.folder",
    "preset": "amor.presets",
    "save": "amor.models.folder",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that `import amor` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'amor' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
