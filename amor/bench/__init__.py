"""Benchmarks of a user's own machine. One module per suite; `amor bench SUITE` runs it.

A suite is a module with `arguments(parser)`, `run(args) -> dict` and `ROWS`, the names of the rows
it can measure. The benchmarks that compare this project with other libraries and with its own goals
are in `benchmarks/`, beside the package.
"""
