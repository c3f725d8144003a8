"""Control goes over gloo: on a device's groups, as over NCCL alone, all workers begin the same collectives in one
order. torch demands one order over all groups of a device."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from core import CO2, CO2Config
from core.groups import host_group
from core.testing import run_distributed
from training.fixed import Fixed
from training.progress import Due, Progress, Trained
from training.recipe import Recipe
from training.workers import join

STARTS = ("all_reduce", "broadcast", "all_gather", "all_to_all_single", "reduce_scatter_tensor", "barrier")


def like_nccl(rank: int, world_size: int, folder: str) -> None:
    """Begins torch.distributed anew with one backend alone, which is gloo under another name."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.destroy_process_group()
    dist.Backend.register_backend("device", make, devices=["cpu"])
    dist.init_process_group("device", init_method=f"file://{folder}/again", rank=rank, world_size=world_size)


def on_the_device(seen: list[str]) -> None:
    """Notes, from here on, each collective that begins on a device's group: D of the default one, C of the method's."""
    for name in STARTS:
        real: Callable[..., Any] = getattr(dist, name)

        def begin(*args: Any, real: Any = real, name: str = name, group: Any = None, **kwargs: Any) -> Any:
            if dist.get_backend(group) != "gloo":
                seen.append(f"{'D' if group in (None, dist.group.WORLD) else 'C'} {name}")
            return real(*args, group=group, **kwargs)

        setattr(dist, name, begin)
        setattr(dist.distributed_c10d, name, begin)


def evaluated(rank: int, world_size: int, folder: str) -> tuple[list[str], list[list[float]], int]:
    """An evaluation is due while a reduction is in flight."""
    like_nccl(rank, world_size, folder)
    seen: list[str] = []
    on_the_device(seen)
    join(torch.device("cpu"), 60.0, {"tau": 2})
    params = [nn.Parameter(torch.ones(8))]
    co2 = CO2(params, CO2Config(tau=2))
    run = Progress(Recipe(), torch.device("cpu"))
    nobody: Any = None  # no folder, no model
    fixed = Fixed(run, nobody, nobody)
    fixed._trained = Trained(nobody, nobody, nobody, co2, "co2", run.snapshots)
    sums = []
    for run.step in range(1, 9):
        with torch.no_grad():
            params[0].add_(0.1)
        co2.step()
        due = fixed.come_together(Due(run.step == 4, run.step == 8, False))
        if due.evaluation:
            sums.append(fixed.sum(torch.full((2,), float(rank))).tolist())
    co2.finish()
    co2.close()
    return seen, sums, fixed.stopped_by(rank)


def test_on_a_devices_groups_all_begin_the_same_in_one_order(tmp_path: Path):
    (first, sums, number), second = run_distributed(evaluated, 2, str(tmp_path))
    assert sums == [[1.0, 1.0]] and number == 1 and (first, sums, number) == second
    assert first.count("C all_reduce") >= 4 and not [name for name in first if name[0] == "D"]


def hosts(rank: int, world_size: int, folder: str) -> None:
    """Where gloo moves the host's tensors no other group is made; else one, for all who have those ranks."""
    half = dist.new_group([0, 1])
    assert host_group() is dist.group.WORLD and host_group(half) is half
    with mock.patch.object(dist, "get_backend_config", lambda g: "cuda:nccl" if g is half else "cpu:gloo,cuda:nccl"):
        assert host_group(half) is dist.group.WORLD
    like_nccl(rank, world_size, folder)
    everyone, half = dist.new_group(), dist.new_group([0, 1])
    made = host_group()
    assert made is not None and dist.get_backend(made) == "gloo"
    assert made is host_group() and made is host_group(everyone)
    assert host_group(half) is host_group(half) and host_group(half) is made


def test_the_default_group_serves_where_it_has_gloo(tmp_path: Path):
    run_distributed(hosts, 2, str(tmp_path))
