"""Gates decide where a block's attention runs: one file per kind; `base.py` is the contract."""
