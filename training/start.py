"""The start of a run: before one worker waits for another in earnest, they compare what each of them was asked for."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from core.errors import UserError
from core.groups import host_group, of_all
from core.robust import peers
from training.workers import rank, world_size

_starts = itertools.count()  # a process may run twice over one store
_HEARD_WITHIN = 10.0  # seconds that the worker which serves the store waits for the others to read it


def join(device: torch.device, timeout: float, settings: dict[str, Any]) -> bool:
    """Joins the process group of all workers that torchrun started; returns whether it had to be made.

    settings: as JSON holds them. UserError on all workers where one has others than rank 0, or was refused its own.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        host_group(timeout=timeout)
        everyone = of_all(settings)
        for number, theirs in enumerate(everyone):
            if verdict := difference(everyone[0], theirs, number):
                raise UserError(verdict)
        peers.meet()
        return False
    if "RANK" not in os.environ:
        return False
    if absent := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"RANK is set, but not {', '.join(absent)}: start the workers with torchrun, or unset RANK")
    prefix, began = f"co2/start{next(_starts)}", time.monotonic()
    try:
        store = _meet(timeout)
        verdict = _agree(dist.PrefixStore(prefix, store), settings)
    except dist.DistError as error:
        verdict = _not_met(error, timeout, waited=time.monotonic() - began)
    if verdict:
        raise UserError(verdict)
    backend = "nccl" if device.type == "cuda" else "gloo"
    within = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank(), world_size=world_size(), timeout=within)
    host_group(timeout=timeout)
    peers.meet()
    return True


def refuse(reason: str) -> None:
    """Tells the other workers, who may wait for this one, that it will not come; nothing where it has come."""
    alone = world_size() < 2 or "MASTER_ADDR" not in os.environ or "CO2_WORKER" in os.environ
    if dist.is_initialized() or alone or next(_starts) > 0:
        return
    with contextlib.suppress(RuntimeError, OSError, ValueError):  # nobody is there to be told
        store = dist.PrefixStore("co2/start0", _meet(_HEARD_WITHIN))
        store.set("verdict", f"rank {rank()} cannot start: {reason}")
        if rank() == 0:
            store.set("settings", "null")
        _be_heard(store)


def _meet(timeout: float) -> dist.Store:
    """The store that torchrun, or rank 0, serves."""
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _not_met(error: dist.DistError, timeout: float, waited: float) -> str:
    """Why the workers did not meet, after `waited` of `timeout` seconds."""
    if waited > 0.9 * timeout:
        return f"not all of {world_size()} workers came within {timeout:g} s: start all of them, or raise --timeout"
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if "EADDRINUSE" in str(error):
        return f"MASTER_PORT={port} is taken by another program on {address}: give another (torchrun --master-port)"
    return f"rank {rank()} cannot meet the others at MASTER_ADDR={address}, MASTER_PORT={port}: {error}".splitlines()[0]


def _agree(store: dist.Store, settings: dict[str, Any]) -> str:
    """Why this run cannot start, or nothing; the same on all workers."""
    if rank() == 0:
        store.set("settings", json.dumps(settings))
    if verdict := difference(json.loads(store.get("settings")) or settings, settings, rank()):
        store.set("verdict", verdict)
    elif store.add("ready", 1) == world_size():
        store.set("verdict", "all agree")
    verdict = store.get("verdict").decode()
    if verdict == "all agree":
        return ""
    _be_heard(store)
    return verdict


def _be_heard(store: dist.Store) -> None:
    """The store ends with rank 0, unless torchrun serves it: then the others could not read why."""
    heard, until = store.add("heard", 1), time.monotonic() + _HEARD_WITHIN
    serves = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while serves and heard < world_size() and time.monotonic() < until:
        time.sleep(0.05)
        heard = store.add("heard", 0)


def difference(first: dict[str, Any], other: dict[str, Any], number: int) -> str:
    """In which settings rank `number` differs from rank 0; nothing where it does not."""
    keys = sorted(key for key in first | other if first.get(key) != other.get(key))
    if not keys:
        return ""
    theirs, ours = (", ".join(f"{key}={of.get(key)}" for key in keys) for of in (other, first))
    return f"rank {number} was started with {theirs}, rank 0 with {ours}: give all workers the same command line"
