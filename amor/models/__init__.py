"""Models: a backbone of mixers, gated blocks behind it, and the tied head."""
