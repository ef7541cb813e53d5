"""What only this project asks of itself: comparisons with other libraries, and goals for its speed
and memory.

Run from a checkout as `python -m benchmarks SUITE`; the package that users install does not hold
it.
"""
