"""What most ranks of the tests import: the process that forks them does it once (core.testing.PRELOAD)."""

import gc

from _pytest.assertion import install_importhook
from _pytest.config import get_config

import tests.on_ranks
import tests.problems  # noqa: F401

install_importhook(get_config())  # a rank's failed assertion shows its values, as pytest's own do
gc.freeze()  # a rank's collector need not walk it, nor copy its memory
