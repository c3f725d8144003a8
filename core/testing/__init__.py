"""For tests and measurements on one machine, here and in a user's project: real processes, and slow links."""

from .processes import run_distributed

__all__ = ["run_distributed"]
