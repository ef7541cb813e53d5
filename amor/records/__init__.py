"""What files hold, as frozen types: training, judging and benchmarks write them, studies and
commands read them.

A number that is not finite is None here and null in a file. A file that breaks its type is one line
that names the place.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

# Past these a picture cannot be drawn to scale; nothing that is measured comes near.
Number = Annotated[float, Meta(ge=-1e100, le=1e100)]
Amount = Annotated[float, Meta(ge=0, le=1e100)]  # of seconds, bytes, tokens per second
# of an untrained model it is larger than any bound: exp of the loss
Perplexity = Annotated[float, Meta(ge=0)]
Steps = Annotated[int, Meta(ge=0, le=10**12)]
# a name in one line
Label = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Words = Annotated[str, Meta(max_length=1 << 20)]
MOST_BLOCKS = 1024


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen structure inside a `typed.File`: keyword arguments only, unknown keys refused."""
