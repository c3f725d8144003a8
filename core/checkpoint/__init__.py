"""Checkpoints: `save` and `load` for a loop, a run's folders, and the format of their files."""

from .runs import load as load
from .runs import save as save
