"""Tests whose body runs on every rank of a process group, with the values of its assertions as pytest shows them."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.testing import run_distributed

Test = Callable[..., None]


def on_ranks(workers: int = 0, through: Callable[..., Any] = run_distributed, **options: Any) -> Callable[[Test], Test]:
    """A test(rank, ...) that `workers` gloo ranks run, or as many as its parameter of that name says.

    through: starts the ranks, with these options. What pytest gives the test, as parameters and tmp_path, must pickle.
    """

    def decorate(fn: Test) -> Test:
        @functools.wraps(fn)
        def test(**given: Any) -> None:
            through(_call, workers or given["workers"], fn.__module__, fn.__name__, given, **options)

        signature = inspect.signature(fn)
        others = [parameter for name, parameter in signature.parameters.items() if name != "rank"]
        test.__signature__ = signature.replace(parameters=others)  # pyright: ignore[reportAttributeAccessIssue]
        return test

    return decorate


def _call(rank: int, world_size: int, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, **given)


def total_world_size(value: Any) -> list[Any]:
    """The value that each rank has given, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def shared_out(fn: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    """fn(case) of each case, on all ranks. One of them calls it: for what is costly and the same on all."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    mine = {i: fn(case) for i, case in enumerate(cases) if i % workers == rank}
    found = {i: result for of_rank in total_world_size(mine) for i, result in of_rank.items()}
    return [found[i] for i in range(len(cases))]


def alike(*tensors: torch.Tensor) -> bool:
    """Whether each rank holds the same, bit for bit."""
    return all(all(map(torch.equal, tensors, theirs)) for theirs in total_world_size(tensors))
