"""Operators: tensors in, tensors out, no parameters. `reference.py` defines each one; the other files are faster guests."""
