"""Gated blocks behind a model that was trained without them: what they are, what they are
calibrated on, what is proved.
"""
