"""Imports every check, in the order of the report."""

from importlib import import_module

for name in ("equal", "many", "hidden", "memory", "trained", "costs", "loops", "searched"):
    import_module(f"bench.gpu.{name}")
