"""head: negative log-likelihood, entropy and margin of the tied head, without T x V."""

from amor.ops.head.chunked import loss, read
from amor.ops.head.reference import IGNORE, Reading

__all__ = ["IGNORE", "Reading", "loss", "read"]
