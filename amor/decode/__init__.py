"""Decode: one token per row and step, from packed weights."""
