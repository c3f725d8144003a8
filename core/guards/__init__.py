"""Hooks that watch over a run: outliers, checksums, misuse, failed workers, averages at the end."""
