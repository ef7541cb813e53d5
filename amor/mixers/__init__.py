"""Mixers: what carries information from token to token. One file a kind; `base.py` is the contract."""
