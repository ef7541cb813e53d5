"""Models of other libraries as ours and ours as theirs: one file per layout, see `base.py`."""
