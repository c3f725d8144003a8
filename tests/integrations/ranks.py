"""Ranks forked from a process that has imported a library once, for libraries that take seconds to import.

`python -m tests.integrations.ranks FOLDER` runs what FOLDER/job names, as core.testing.run_distributed does.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _pytest.assertion import install_importhook
from _pytest.config import get_config

import core.testing
from core.integrations.common import _end_loading
from tests.zygote import ROOT, Zygote

SECONDS = 120.0


class Ranks:
    """Runs functions on so many gloo ranks; modules: what is imported before. Use it as a context manager."""

    def __init__(self, *modules: str):
        # training.prepared: transformers and lightning import torchvision
        self._zygote = Zygote(["training.prepared", "tests.integrations.ranks", *modules])

    def __enter__(self) -> Ranks:
        self._zygote.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._zygote.__exit__(*error)

    def __call__(self, fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """As core.testing.run_distributed."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "job").write_bytes(pickle.dumps((fn, world_size, args)))
            done = self._zygote.run(
                "tests.integrations.ranks", [folder], env={}, folder=ROOT, seconds=SECONDS + 20, file_limit=0
            )
            assert done.status == 0 and not done.hung, done.err[-6000:]
            return pickle.loads(Path(folder, "result").read_bytes())


def as_by_torchrun(rank: int, world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """The environment that libraries read, and their messages left out."""
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore # a rank may have loading processes
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "ACCELERATE_USE_CPU": "1"}
    try:
        return fn(rank, world_size, *args)
    finally:
        _end_loading()  # as at a script's exit: a forked rank has none, and would wait for its loading processes


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    install_importhook(get_config())  # a rank's failed assertion shows its values, as pytest's own do
    fn, world_size, args = pickle.loads((folder / "job").read_bytes())
    gc.freeze()  # libraries collect garbage in every run: not among what they have imported
    core.testing._context = lambda: multiprocessing.get_context("fork")
    results = core.testing.run_distributed(as_by_torchrun, world_size, fn, *args, timeout=SECONDS)
    (folder / "result").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
