"""The asynchronous mean, the throttled link, process groups, and the helper that runs several processes."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import CO2, CO2Config, CompressionConfig, make_method
from core.baselines.table import METHODS
from core.comm import BACKGROUND, AsyncAllReduce, ring_bytes
from core.errors import UserError
from core.testing import run_distributed
from core.testing.link import ThrottledLink
from tests.imports import ROOT
from tests.on_ranks import on_ranks
from tests.problems import Mean, refusal, sgd_step

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@on_ranks(3)
def test_mean_of_every_dtype_and_shape(rank: int):
    """Worker r writes (r + 1) 10^i into tensor i of a bucket; the mean over 3 workers is 2 x 10^i."""
    tensors = [torch.zeros(s, dtype=d) for d in DTYPES for s in [(3,), (), (0, 2), (2, 5)]]
    mean = Mean(tensors, {"rank": 1, "sevens": 2})
    for bucket in mean.buckets:
        for i, (view, member) in enumerate(zip(bucket.payload_views, bucket.params, strict=True)):
            assert view.shape == member.shape
            view.fill_((rank + 1) * 10.0**i)
    mean.scalars.set("rank", float(rank))
    mean.scalars.set("sevens", torch.full((2,), 7.0))
    mean.launch()
    mean.wait()
    assert [mean.scalars["rank"].item(), *mean.scalars["sevens"].tolist()] == [1.0, 7.0, 7.0]
    assert all(b.payload.tolist() == [2.0] * 3 + [20.0] + [2000.0] * 10 for b in mean.buckets)
    sums = (torch.float64, torch.float32, torch.float32, torch.float32)
    assert [(b.dtype, b.flat.dtype) for b in mean.buckets] == list(zip(DTYPES, sums, strict=True))
    assert all(not t.any() for t in tensors), "the templates were written to"
    mean.close()


@on_ranks(2)
def test_the_mean_has_a_group_of_its_own(rank: int, tmp_path: Path):
    """A collective of the model's overtakes it: in one shared group the two would be mixed up."""
    gate = tmp_path / "gate"
    mean = Mean([torch.zeros(10)])
    if rank == 0:
        mean.launch()
    other = torch.tensor(1.0)
    dist.all_reduce(other)  # in the model's own group, while the mean is still incomplete
    if rank == 1:
        assert gate.exists() is False
        gate.touch()
        mean.launch()
    mean.wait()
    assert other.item() == 2.0


def test_misuse_is_caught_without_a_process_group():
    mean = Mean([torch.zeros(2)])
    with pytest.raises(AssertionError, match="nothing was launched"):
        mean.wait()
    mean.buckets[0].flat[:2] = torch.tensor([1.0, 2.0])
    mean.launch()
    with pytest.raises(AssertionError, match="in flight"):
        mean.launch()
    with pytest.raises(UserError, match="in flight, whose average would be lost: call finish"):
        mean.close()
    assert mean.done()
    mean.wait()
    assert mean.buckets[0].flat[:2].tolist() == [1.0, 2.0]
    assert mean.allreduce.bytes_sent == 0


class Slow:
    """A collective that ends after a while; notes whether somebody waited for it in torch before."""

    def __init__(self) -> None:
        self.ends, self.blocked = time.perf_counter() + 0.1, False

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.ends

    def wait(self, timeout: object = None) -> None:
        self.blocked |= not self.is_completed()
        time.sleep(max(0.0, self.ends - time.perf_counter()))


def test_the_thread_waits_inside_torch_only_while_the_caller_waits_for_it():
    """The interpreter's end would take the process down: it ends such a thread in the middle of torch's code."""
    background = AsyncAllReduce(torch.device("cpu"))
    for caller_waits in (False, True):
        work = Slow()
        background.launch(iter([([work], 0)]))
        while not caller_waits and not background.done():
            time.sleep(0.01)
        background.wait()
        assert work.blocked is caller_waits and work.is_completed()


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError("broken")], ids=repr)
@pytest.mark.parametrize("first", [True, False])
def test_what_fails_in_a_stage_never_lands(error: Exception, first: bool):
    """Raised as it is, once; later calls say that it has failed, rather than to use partial sums."""

    def stages() -> Iterator[Any]:
        if not first:
            yield BACKGROUND
        raise error

    background = AsyncAllReduce(torch.device("cpu"))
    with pytest.raises(type(error), match="broken"):
        background.launch(stages())
        background.wait()
    assert not background.in_flight
    with pytest.raises(RuntimeError, match="failed before: .*broken"):
        background.done()
    with pytest.raises(RuntimeError, match="failed before"):
        background.launch(iter(()))


@on_ranks(2)
def test_nobody_trains_on_alone_after_close(rank: int):
    mean = Mean([torch.ones(3)])
    mean.launch()
    mean.wait()
    mean.close()
    assert "close() has left" in refusal(mean.launch)


def test_bytes_of_a_ring():
    assert [ring_bytes(1200, n) for n in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]


def hang_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_a_hung_rank_is_named_and_killed():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^rank 1 still running after 4 s$"):
        run_distributed(hang_on_rank_1, 2, timeout=4)
    assert time.monotonic() - start < 30


def die_on_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        dist.barrier()  # rank 0 has its group
        os._exit(0)
    dist.barrier()
    return "alive"


def test_a_rank_that_vanishes_is_no_success():
    with pytest.raises(RuntimeError, match="rank 1"):
        run_distributed(die_on_rank_1, 2, timeout=5)
    assert run_distributed(die_on_rank_1, 2, expect_death=(1,)) == ["alive", None]


MBIT = 8.0  # a million bytes a second


def test_reservations_queue_one_behind_the_other():
    link = ThrottledLink(MBIT)
    start = time.perf_counter()
    first, second = link.reserve(100_000), link.reserve(50_000)
    assert first >= start + 0.1
    assert second - first == pytest.approx(0.05)
    assert time.perf_counter() < second, "reserving must not wait"


@on_ranks(3)
def test_a_throttled_mean_takes_its_time_and_overlaps_with_computation(rank: int):
    """100,000 float32 on three workers: each sends 4/3 x 400,000 bytes, 0.533 s."""
    mean = Mean([torch.zeros(100_000)], link=ThrottledLink(MBIT))
    mean.buckets[0].flat.fill_(rank)
    start = time.perf_counter()
    mean.launch()
    launched, busy = time.perf_counter() - start, 0
    assert not mean.done()
    while not mean.done():  # computation goes on underneath
        torch.ones(100).sum()
        busy += 1
    landed = time.perf_counter() - start
    mean.wait()
    assert mean.allreduce.bytes_sent == 533_333 and busy > 10 and launched < landed
    assert landed >= 0.533 and mean.allreduce.seconds >= 0.533
    assert mean.buckets[0].flat.mean().item() == 1.0


@on_ranks(2)
def test_every_method_crosses_the_same_link(rank: int):
    """Three rounds of 0.1 s of communication with nothing to hide it behind; finish() drains what is in flight."""
    for name in METHODS:
        model = nn.Linear(250, 100, bias=False)
        wrapped, method = make_method(name, model, co2=CO2Config(tau=1), link=ThrottledLink(MBIT))
        start, waited = time.perf_counter(), 0.0
        for _ in range(3):
            wrapped(torch.ones(1, 250)).sum().backward()
            method.step()
            waited += method.stats.exposed_seconds
        method.finish()
        assert time.perf_counter() - start >= 0.3 and waited >= (0.0 if name == "ddp" else 0.1), name


# A fresh process for each rank: those of run_distributed are forked from one that has imported nearly all of torch.
SCRIPT = """
import gc, sys
from pathlib import Path

import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # a backend that moves nothing, as NCCL moves nothing of a CPU's
from core import CO2Config, CompressionConfig, make_method
from core.comm import host_group

rank, folder, kinds = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
gc.disable()  # a cycle of references is no reason either

def threads():
    return sum("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))

def settings(kind):
    return {
        "co2": lambda: {"co2": CO2Config(tau=2)},
        "co2 sharded": lambda: {"co2": CO2Config(tau=2), "shard": True},
        "co2 of a subgroup": lambda: {"co2": CO2Config(tau=2), "group": [dist.new_group([i]) for i in range(2)][rank]},
        "ddp over int4": lambda: {"ddp_compression": CompressionConfig("int4")},
    }[kind]()

def train(kind):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)  # imports torch._dynamo
    model, method = make_method(kind.split()[0], net, **settings(kind))
    with method:
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            method.step()
    return model, method

kept = []  # as a script's own names are at its end
for kind in kinds:
    store = dist.FileStore(f"{folder}/{kind}", 2)
    dist.init_process_group("fake" if kind == "host" else "gloo", store=store, rank=rank, world_size=2)
    if kind == "host":
        assert (made := host_group()) is host_group(), "made once"
        dist.barrier(made)  # else one rank ends it while the other still connects
        del made
    else:
        kept.append(train(kind))
    before = threads()
    dist.destroy_process_group()
    print(f"{kind}: {before > 0}, {threads()}")
"""
KINDS = ("co2", "co2 sharded", "co2 of a subgroup", "ddp over int4", "host")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
def test_no_thread_of_gloos_is_left(tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path), *KINDS], env=env, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert said.splitlines() == [f"{kind}: True, 0" for kind in KINDS]


@pytest.mark.slow
@on_ranks(2)
def test_the_scripts_default_device_changes_nothing(rank: int):
    """A meta tensor fits no other, as a GPU's fits none on the host."""
    int4 = replace(CO2Config.paper(2), compression=CompressionConfig("int4"))
    made = [functools.partial(CO2, config=int4)]
    made += [functools.partial(CO2, config=CO2Config.paper(2), shard=True, offload=True)]
    for make in made:
        ends = []
        for device in ("cpu", "meta"):
            params = [nn.Parameter(torch.full((4, n), float(rank))) for n in (1, 3)]
            rest = [torch.full((3,), float(rank)) for _ in range(2)]
            with torch.device(device):
                method = make(params, buffers=rest[:1], average=rest[1:])
            for step in range(4):
                sgd_step(params, rank, step)
                rest[1].add_(rank)
                with torch.device(device):
                    method.step()
            with torch.device(device):
                method.finish()
                method.close()
            ends.append(torch.cat([t.detach().flatten() for t in (*params, *rest)]))
        assert torch.equal(*ends)
