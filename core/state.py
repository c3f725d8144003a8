"""A method's state in a checkpoint: under which key it is, and whether it fits the method that loads it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .errors import UserError


def under_rank(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a worker's own state under a key with its rank.

    torch.distributed.checkpoint writes one dict for all workers, and each key once, even if workers hold different
    values.
    """
    return {f"rank{_rank()}": state}


def of_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this worker's part of a state, or the part at index rank modulo their number if it has none."""
    ranks = sorted(int(key[4:]) for key in state if re.fullmatch(r"rank\d+", key))
    if not ranks:
        raise UserError(
            "the checkpoint's state has no key with a worker's rank, so an older version wrote it: resume with that "
            "version, or start afresh"
        )
    rank = _rank()
    return state[f"rank{rank if rank in ranks else ranks[rank % len(ranks)]}"]


def _rank() -> int:
    """This worker's rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


REQUIRED = ("method", "flats", "workers", "places", "reducer", "taus")  # keys in every method's part of a checkpoint


def check_run(state: Mapping[str, Any], method: str, workers: int, *, equal: bool) -> None:
    """Raises UserError if an older version or another method wrote a checkpoint.

    The same holds for another number of workers, unless all workers had `equal` outer states.
    """
    if missing := [key for key in REQUIRED if key not in state]:
        raise UserError(
            f"the checkpoint's state has no {missing[0]!r}, so an older version wrote it: resume with that version, or "
            "start afresh"
        )
    if state["method"] != method:
        raise UserError(f"the checkpoint is of {state['method']}, not {method}: resume with its method")
    if state["workers"] != workers and not equal:
        raise UserError(
            f"the checkpoint is of {state['workers']} workers, here there are {workers}, and each held a part of the "
            "outer state of its own: resume with as many"
        )


def order_of(params: Iterable[Tensor]) -> int:
    """Returns a number that follows from the parameters' shapes and their order."""
    return zlib.crc32(str([tuple(p.shape) for p in params]).encode())


def check_saved(saved: Mapping[str, Sequence[Tensor]], current: Mapping[str, Sequence[Tensor]]) -> None:
    """Raises UserError if another model or other settings wrote a checkpoint."""
    if saved.keys() != current.keys():
        theirs, mine = (", ".join(sorted(names.keys() - {"all-reduce"})) for names in (saved, current))
        raise UserError(
            f"the checkpoint holds {theirs}, and this method holds {mine}: resume with the settings that wrote it"
        )
    for name, flats in current.items():
        if (theirs := [len(f) for f in saved[name]]) != (mine := [len(f) for f in flats]):
            raise UserError(
                f"the checkpoint's {name} has {theirs} elements, here it has {mine}: resume with the model, the "
                "buffers to average, the hooks and the compression that wrote it"
            )


def resized(flats: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of flats as long as their counterparts, cut or padded with zeros."""
    found = [flat.new_zeros(len(other)) for flat, other in zip(flats, like, strict=True)]
    for new, flat in zip(found, flats, strict=True):
        n = min(len(new), len(flat))
        new[:n] = flat[:n]
    return found


def on_host(held: Any) -> Any:
    """Copies a tensor, or a list of them one by one, to host memory, and waits for it. Returns anything else as it is.

    A GPU needs no memory for it. The host's memory is not pinned: torch would round it up to a power of two, and keep
    it.
    """
    if isinstance(held, list):
        return [on_host(t) for t in held]
    return held.to("cpu", copy=True) if isinstance(held, Tensor) else held
