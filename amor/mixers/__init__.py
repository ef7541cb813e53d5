"""Mixers: what carries information from token to token. One file per kind."""
