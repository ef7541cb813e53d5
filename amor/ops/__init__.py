"""Operators: tensors in, tensors out, no parameters.

`reference.py` defines each one; the other files of its folder are faster backends.
"""
