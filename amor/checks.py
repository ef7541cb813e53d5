"""Ranges of every number of a model, how numbers must fit each other, and the contract of options.

The ranges are types (`width: Width`), which typed.py enforces. Ceilings are far above any real
model: a slip of the hand is refused in one line instead of taking hours or all memory. Options of
mixers and gates use these types, so this module imports neither of them, nor torch.
"""

import math
from typing import Annotated, Protocol, runtime_checkable

from msgspec import Meta

from amor.errors import AmorError

MOST_LAYERS = 4096  # of a backbone; and as many blocks
MOST_PARAMETERS = 2**41  # 2.2e12, 8.8 TB in float32
MOST_TOKENS = 2**21  # of a vocabulary: what counts tokens, or holds a row for each, stays in memory

# The types of config fields, by what they count. A vocabulary has at least 2 tokens: entropy is
# divided by its logarithm.
Vocab = Annotated[int, Meta(ge=2, le=MOST_TOKENS)]
Width = Annotated[int, Meta(ge=1, le=2**17)]
InnerWidth = Annotated[int, Meta(ge=0, le=2**20)]  # 0: none
Context = Annotated[int, Meta(ge=1, le=2**20)]
Blocks = Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
Pattern = Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=MOST_LAYERS)]
HeadSize = Annotated[int, Meta(ge=1, le=4096)]
Heads = Annotated[int, Meta(ge=0, le=2**14)]  # 0: as many as the width gives
Expand = Annotated[int, Meta(ge=1, le=16)]  # how many times wider
StateSize = Annotated[int, Meta(ge=1, le=4096)]
Groups = Annotated[int, Meta(ge=1, le=4096)]
Taps = Annotated[int, Meta(ge=2, le=256)]  # of a convolution
Theta = Annotated[float, Meta(ge=1, le=1e12)]
Std = Annotated[float, Meta(gt=0, le=10)]  # of initial weights
Eps = Annotated[float, Meta(gt=0, le=1)]
Floor = Annotated[float, Meta(ge=0, lt=1)]  # lower bound of alpha, a sigmoid
Seed = Annotated[int, Meta(ge=-(2**53), le=2**53)]


@runtime_checkable
class MixerOptions(Protocol):
    """What the Options of every mixer can do at a model width, without building the mixer."""

    def check(self, width: int) -> None:
        """Raise an AmorError where a mixer of this shape cannot be built."""

    def parameters(self, width: int) -> int:
        """Exactly how many numbers the parameters of the mixer hold."""


def divides(where: str, whole: int, part: int, what: str) -> None:
    """`part` must divide `whole`; the message names the nearest size that would."""
    if part < 1 or whole % part:
        small = [p for p in range(1, math.isqrt(whole) + 1) if whole % p == 0]
        best = min(
            (p for pair in small for p in (pair, whole // pair)), key=lambda p: (abs(p - part), p)
        )
        raise AmorError(
            f"{where}: {what} {part} does not divide {whole}; the nearest that does is {best}"
        )


def even_heads(where: str, head_size: int) -> None:
    """Refuse an odd head size: rotary embedding turns pairs of channels."""
    if head_size % 2:
        raise AmorError(
            f"{where} is {head_size}; rotary embedding turns pairs, so it must be even, "
            f"e.g. {head_size + 1}"
        )
