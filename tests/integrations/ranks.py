"""Ranks as torchrun starts them, for libraries' trainers. A test module names what it needs of a library in LIBRARY."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import training.prepared  # noqa: F401, transformers and lightning import torchvision
from core.integrations.loading import end_loading
from core.testing import run_distributed


def ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As run_distributed."""
    return run_distributed(_as_by_torchrun, world_size, fn, *args, timeout=120.0)


def _as_by_torchrun(rank: int, world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """With the environment that libraries read."""
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore # a rank may have loading processes
    multiprocessing.set_start_method("fork", force=True)  # and forks them, as a script of torchrun's
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "ACCELERATE_USE_CPU": "1"}
    try:
        return fn(rank, world_size, *args)
    finally:
        end_loading()  # as at a script's exit: a forked rank has none, and would wait for its loading processes
