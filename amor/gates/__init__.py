"""Gates: who decides where a block's attention runs. One file a kind; `base.py` is the contract."""
