"""Judging a model on text: traces, the worth of a gate, equivalence, perplexity."""
