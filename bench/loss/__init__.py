"""Loss after a number of steps: every method with the same tuning budget, all workers in one process.

The command line is python -m bench.loss.
"""
