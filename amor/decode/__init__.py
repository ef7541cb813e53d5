"""Decode: one token a row at a time, from weights made ready once."""
