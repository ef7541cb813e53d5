"""How many numbers a model's state holds, from its shapes alone: what a recurrent memory is to be
measured against.
"""

from math import prod

from amor.config import Config
from amor.form import spec_of
from amor.models.build import build
from amor.records.recall import StateSize


def state_size(config: Config) -> StateSize:
    """Of one row: numbers held however much was read, and numbers held for each token that was
    read.
    """
    held = [
        thing
        for part in spec_of(build(config, device="meta").start(1).parts).parts
        for thing in part.values()
    ]
    return StateSize(
        fixed=sum(prod(thing.shape) for thing in held if not thing.keys),
        a_token=sum(2 * prod(thing.shape) for thing in held if thing.keys),
    )
