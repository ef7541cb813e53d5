"""delta: the gated delta rule."""

from amor.ops.delta.chunked import delta as chunked
from amor.ops.delta.reference import delta as reference

__all__ = ["chunked", "delta", "reference"]
delta = chunked
