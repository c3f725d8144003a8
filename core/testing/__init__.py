"""For tests and measurements on one machine, here and in a user's own project: several real processes."""

from .processes import run_distributed

__all__ = ["run_distributed"]
