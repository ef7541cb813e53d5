"""The size of a model's State in numbers, from its shapes alone."""

from math import prod

from amor.config import Config
from amor.form import spec_of
from amor.models.build import build
from amor.records.recall import StateSize


def state_size(config: Config) -> StateSize:
    """Numbers per row: of fixed size, and per token read (keys and values)."""
    parts = spec_of(build(config, device="meta").start(1).parts).parts
    specs = [spec for part in parts for spec in part.values()]
    return StateSize(
        fixed=sum(prod(spec.shape) for spec in specs if not spec.keys),
        a_token=sum(2 * prod(spec.shape) for spec in specs if spec.keys),
    )
