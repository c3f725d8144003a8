"""Weights of runs and of other libraries: read without running code, evaluated, and exported."""
