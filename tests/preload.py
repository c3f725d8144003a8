"""What most ranks of the tests import: the process that forks them does it once (core.testing.PRELOAD)."""

import gc

import pytest  # noqa: F401

import tests.problems  # noqa: F401

gc.freeze()  # a rank's collector need not walk it, nor copy its memory
