"""Benchmarks: what the machine can do, and what share of it we reach. One module a suite, run by `amor bench <suite>`."""
