"""Models of other libraries as ours, and ours as theirs: one file a layout; `base.py` is the contract."""
