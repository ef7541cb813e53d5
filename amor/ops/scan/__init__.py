"""scan: the Mamba2 recurrence."""

from amor.ops.scan.chunked import scan as chunked
from amor.ops.scan.reference import scan as reference

__all__ = ["chunked", "reference", "scan"]
scan = chunked
