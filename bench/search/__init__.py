"""A fair search: every method tuned with the same small budget, all workers of a run in one process.

The command line is python -m bench.search.
"""
