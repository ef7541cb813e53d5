"""Gated blocks behind a model that was trained without them: making, calibrating, checking."""
