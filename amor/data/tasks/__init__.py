"""Generated tasks whose answers are known: one file a kind, `base.py` is the contract."""
