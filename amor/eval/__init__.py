"""Evaluation: the paper's suites through lm-evaluation-harness, offline too, with the gate in every row."""

import os

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: the harness's bars would stand among ours
