"""conv: the short causal convolution."""

from amor.ops.conv.reference import conv

__all__ = ["conv"]
