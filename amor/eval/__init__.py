"""Evaluation: the paper's suites through lm-evaluation-harness, offline too, with the gate in every
row."""

import os

# read when tqdm is imported: the bars of the harness would mix with ours
os.environ.setdefault("TQDM_DISABLE", "1")
