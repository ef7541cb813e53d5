"""attend: softmax attention, for all queries or for those that fired."""

from amor.ops.attend.dense import attend as dense
from amor.ops.attend.gathered import attend as gathered
from amor.ops.attend.reference import attend as reference

__all__ = ["dense", "gathered", "reference"]
