"""This worker's rank, device and node, and the start, where workers compare their settings before any of them waits."""

import contextlib
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.errors import UserError, env_number
from core.groups import host_group, local_world_size, of_all
from core.guards import failure
from core.guards.inputs import check_env
from core.nodes import node_mesh
from core.testing.link import ThrottledLink

Number = TypeVar("Number", int, float)
NVIDIA = Path("/proc/driver/nvidia/gpus")
_starts = itertools.count()  # a process may run twice with one store
_HEARD_WITHIN = 10.0  # seconds that the worker which serves the store waits until all others have read it


def rank() -> int:
    """Returns this worker's rank from torchrun, or 0 without torchrun."""
    return env_number("RANK", 0)


def world_size() -> int:
    """Returns the number of workers from torchrun, or 1 without torchrun."""
    return env_number("WORLD_SIZE", 1, least=1)


def pick_device(name: str) -> torch.device:
    """Returns the device that auto, cpu or cuda names."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device here; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        hidden = name == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if NVIDIA.exists() and not hidden and env_number("LOCAL_RANK", 0) == 0:
            print("warning: torch cannot use this machine's NVIDIA GPUs, so it trains on the CPU", file=sys.stderr)
        return torch.device("cpu")
    index, count = env_number("LOCAL_RANK", 0), torch.cuda.device_count()
    if index >= count:
        raise UserError(f"LOCAL_RANK={index}: torch sees {count} CUDA devices here; start as many workers a node")
    return torch.device("cuda", index)


def make_link(mbit: float | None, device: torch.device) -> ThrottledLink | None:
    """Returns the emulated slow link that a recipe asks for, or None for the real link."""
    if mbit is None:
        return None
    if device.type == "cuda":
        raise UserError(f"link_mbit={mbit}: the emulated link works on CPUs only; leave it out")
    return ThrottledLink(mbit)


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether the hardware computes in bfloat16. Emulation would be many times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine() in ("x86_64", "AMD64"):  # oneDNN reports support for any AVX-512, and emulates it
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def tune(device: torch.device, *, tf32: bool) -> None:
    """Sets the options that make a GPU faster. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True


def to_device(images: Tensor, device: torch.device) -> Tensor:
    """Moves images [n, c, h, w] to the device without waiting, on a GPU with their channels innermost."""
    images = images.to(device, non_blocking=True)
    return images.contiguous(memory_format=torch.channels_last) if device.type == "cuda" else images


def upload(t: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host to the device, through pinned memory, so that the host does not wait."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def make_mesh(device: torch.device, per_node: int, zero: int, timeout: float = 600.0) -> DeviceMesh | None:
    """Returns the mesh [nodes, workers per node] if the workers of a node synchronize every step, else None.

    Args:
        device: This worker's device.
        per_node: Number of consecutive ranks per node. 0 means the ranks that torchrun or Slurm started on a machine.
        zero: ZeRO stage.
        timeout: Seconds until a missing worker is an error.
    """
    n = per_node or local_world_size()
    check_nodes(n, zero, dist.get_world_size() if dist.is_initialized() else 1)
    return node_mesh(device.type, n, timeout) if n > 1 else None


def check_nodes(n: int, zero: int, world: int) -> None:
    """Refuses ZeRO in a node of one worker, and nodes of n workers that do not divide the number of workers."""
    if zero and n < 2:
        raise UserError(
            f"zero={zero} with 1 worker per node has nothing to shard: give --per_node 0 (the workers of a machine) or "
            "a number above 1"
        )
    if n > 1 and world == 1:
        raise UserError(f"per_node={n} needs {n} workers or a multiple: start them with torchrun")
    if world % n:
        raise UserError(f"per_node={n} does not divide {world} workers: start equally many on each node")


def least_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the smallest time of some repeats, after one that warms up."""
    times = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def largest_of_workers(numbers: Sequence[Number], group: dist.ProcessGroup | None = None) -> list[Number]:
    """Returns the largest of each number over the group (None: all workers). Every worker must call it."""
    return [max(of) for of in zip(*of_all(list(numbers), group), strict=True)]


# -- the start ----------------------------------------------------------------------------------------------------


def join(device: torch.device, timeout: float, settings: dict[str, Any]) -> bool:
    """Joins the process group of all workers that torchrun started.

    Args:
        device: This worker's device.
        timeout: Seconds until a missing worker is an error.
        settings: This worker's settings, as JSON values.

    Returns:
        Whether this call made the process group.

    Raises:
        UserError: On all workers, if a worker's settings differ from rank 0's, or a worker has refused its own.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        host_group(timeout=timeout)
        everyone = of_all(settings)
        for number, theirs in enumerate(everyone):
            if verdict := difference(everyone[0], theirs, number):
                raise UserError(verdict)
        failure.register()
        return False
    if "RANK" not in os.environ:
        if (workers := world_size()) > 1:
            remedy = "start the workers with torchrun, or unset WORLD_SIZE"
            raise UserError(f"WORLD_SIZE={workers} is set, but not RANK: {remedy}")
        return False
    if absent := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"RANK is set, but not {', '.join(absent)}: start the workers with torchrun, or unset RANK")
    check_env()
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
    try:
        dist.init_process_group(backend, store=store, rank=rank(), world_size=world_size(), timeout=within)
        host_group(timeout=timeout)
    except RuntimeError as error:  # a network that the workers cannot use, or a worker that has just ended
        remedy = "see what the other workers print, and set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        raise UserError(f"the workers cannot connect ({str(error).splitlines()[0]}): {remedy}") from None
    failure.register()
    return True


def refuse(reason: str) -> None:
    """Reports to the other workers, which may wait for this one, that it cannot start. Does nothing after the start."""
    with contextlib.suppress(RuntimeError, OSError, ValueError):  # no other worker is there, or it cannot be reached
        check_env()
        alone = world_size() < 2 or "MASTER_ADDR" not in os.environ or "CO2_WORKER" in os.environ
        if dist.is_initialized() or alone or next(_starts) > 0:
            return
        store = dist.PrefixStore("co2/start0", _meet(_HEARD_WITHIN))
        store.set("verdict", f"rank {rank()} cannot start: {reason}")
        if rank() == 0:
            store.set("settings", "null")
        _be_heard(store)


def _meet(timeout: float) -> dist.Store:
    """Returns the store that torchrun, or rank 0, serves."""
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _not_met(error: dist.DistError, timeout: float, waited: float) -> str:
    """Returns why the workers did not meet, after `waited` of `timeout` seconds."""
    if waited > 0.9 * timeout:
        return f"not all of {world_size()} workers came within {timeout:g} s: start all of them, or raise --timeout"
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if "EADDRINUSE" in str(error):
        return f"MASTER_PORT={port} is taken by another program on {address}: give another (torchrun --master-port)"
    return f"rank {rank()} cannot reach rank 0 at MASTER_ADDR={address}, MASTER_PORT={port}: {error}".splitlines()[0]


def _agree(store: dist.Store, settings: dict[str, Any]) -> str:
    """Returns why this run cannot start, or "". The result is the same on all workers."""
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
    """Waits until all workers have read the verdict, if rank 0 serves the store and would end it."""
    heard, until = store.add("heard", 1), time.monotonic() + _HEARD_WITHIN
    serves = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while serves and heard < world_size() and time.monotonic() < until:
        time.sleep(0.05)
        heard = store.add("heard", 0)


def difference(first: dict[str, Any], other: dict[str, Any], number: int) -> str:
    """Returns the settings in which rank `number` differs from rank 0, or ""."""
    keys = sorted(key for key in first | other if first.get(key) != other.get(key))
    if not keys:
        return ""
    theirs, ours = (", ".join(f"{key}={of.get(key)}" for key in keys) for of in (other, first))
    return f"rank {number} was started with {theirs}, rank 0 with {ours}: give all workers the same command line"
