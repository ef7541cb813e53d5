"""Generated tasks whose answers are known: one file per kind, `base.py` is the contract."""
