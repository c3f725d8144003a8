"""What the NCCL path relies on, with stand-ins that behave as torch documents; no CUDA device is needed.

torch on Work.wait for NCCL: without a timeout the current stream waits for the collective and the host does not; with a
timeout the host waits until the collective has completed.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import (
    CO2,
    CO2Config,
    CollectiveError,
    CompressionConfig,
    DivergedError,
    UserError,
    groups,
    make_method,
    stats,
)
from core import comm as collectives
from core.comm import AsyncAllReduce
from core.tau import AdaptiveTau
from tests import problems
from tests.on_ranks import on_ranks

SECONDS = 0.4


class NcclWork:
    """A collective that takes SECONDS of the device's time."""

    def __init__(self) -> None:
        self.ends = time.perf_counter() + SECONDS

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.ends

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            time.sleep(max(0.0, self.ends - time.perf_counter()))


class FakeStream:
    """Stands for torch.cuda.Stream; counts how often another was made to wait for it."""

    def __init__(self, device: torch.device, priority: int = 0):
        self.inside, self.joined = 0, 0

    def wait_stream(self, other: Any) -> None:
        assert not self.inside
        other.joined += 1

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncAllReduce]:
    computing = FakeStream(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", FakeStream.used)
    monkeypatch.setattr(collectives, "moved_by_nccl", lambda group, device: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield AsyncAllReduce(torch.device("cpu"))
    dist.destroy_process_group()


def stages(background: AsyncAllReduce) -> Iterator[collectives.Stage]:
    for _ in range(2):
        side: Any = background._side
        assert side.inside == 1, "the stages must be queued in the stream of their own"
        yield [NcclWork()], 100


def test_neither_launch_nor_wait_blocks_the_host(background: AsyncAllReduce):
    began = time.perf_counter()
    background.launch(stages(background))
    assert background.done()
    background.wait()
    assert time.perf_counter() - began < SECONDS / 2, "the host waited for a collective that has not ended"
    side: Any = background._side
    assert side.joined == 1 and background.bytes_sent == 200
    assert float(background.exposed) < SECONDS / 2


class GlooWork(NcclWork):
    def wait(self, timeout: timedelta | None = None) -> None:
        time.sleep(max(0.0, self.ends - time.perf_counter()))


def test_what_the_host_waits_for_gloo_is_counted_once(background: AsyncAllReduce):
    """A GPU's stream stands still while the host waits: four workers on one GPU had told twice the time."""
    background.by_nccl = False
    background.launch(iter([([GlooWork()], 100)]))
    background.wait()
    assert SECONDS / 2 < float(background.exposed) < 1.5 * SECONDS


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
        ("cuda:nccl", "cpu", "no"),
    ],
)
def test_the_backend_is_that_of_the_tensors(monkeypatch: Any, config: str, device: str, backend: str):
    """dist.get_backend says "undefined" where a group has several."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group: Any = None
    assert groups.backend_for(group, torch.device(device)) == backend
    assert groups.moved_by_nccl(group, torch.device(device)) is (device == "cuda" and backend == "nccl")


@pytest.mark.parametrize("name", groups.BLOCKING)
def test_an_environment_that_makes_every_wait_block_is_refused(name: str, monkeypatch: Any):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setenv(name, "1")
    group: Any = None
    with pytest.raises(UserError, match=f"{name}=1: .*unset it"):
        groups.moved_by_nccl(group, torch.device("cuda"))


class OnDevice(torch.Tensor):
    """Numbers that pass for a device's."""

    is_cuda = True  # pyright: ignore[reportAssignmentType]


class Passed:
    """An event that the device has passed."""

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_heard_a_round_later_is_told_of_its_own_round(on_device: bool, monkeypatch: Any):
    if on_device:
        exchange = stats.AsyncReadback.exchange
        later = lambda self, numbers, *of: exchange(self, numbers.as_subclass(OnDevice), *of)  # noqa: E731
        monkeypatch.setattr(stats.AsyncReadback, "exchange", later)
        monkeypatch.setattr(torch.cuda, "Event", Passed)
        monkeypatch.setattr(stats, "mark", lambda device: Passed())
    params = problems.odd_parameters()
    co2 = CO2(params, CO2Config(tau=2))
    for step in range(8):
        problems.sgd_step(params, 0, step)
        if step == 7:
            torch.nn.init.constant_(params[0], float("nan"))
        co2.step()
    with pytest.raises(DivergedError, match="in round 3 is not finite"):
        for _ in range(4):
            co2.step()


@on_ranks(1)
def test_a_group_that_cannot_move_the_tensors_is_refused_with_the_remedy(rank: int):
    text = problems.refusal(AsyncAllReduce, torch.device("meta"))
    assert "moves no meta tensors" in text and "cpu:gloo,cuda:nccl" in text


def test_a_format_is_changed_in_the_computations_own_stream(
    background: AsyncAllReduce, monkeypatch: pytest.MonkeyPatch
):
    """It lets memory go that was taken there, for that stream to use again at once."""
    p = nn.Parameter(torch.ones(3))
    co2 = CO2([p], CO2Config(tau="auto", tau_max=1, compression=CompressionConfig("auto")))
    changes: list[tuple[str, int]] = []
    become = co2.reducer.become

    def noted(kind: str) -> None:
        side: Any = co2.allreduce._side
        changes.append((kind, side.inside))
        become(kind)

    monkeypatch.setattr(co2.reducer, "become", noted)
    for compression in ("int4", "float32"):
        co2.hook(AdaptiveTau).tuner.compression = compression
        co2.step()
        assert co2.reducer.kind == compression and changes.pop() == (compression, 0)
    background.close()


@pytest.mark.parametrize("how", ["load", "resync"])
def test_what_a_gpu_still_holds_of_a_diverged_run_is_not_heard_after_a_new_start(how, monkeypatch):
    monkeypatch.setattr("core.stats.read_blocks", lambda t: True)
    weight = nn.Parameter(torch.ones(3))
    co2 = CO2([weight], CO2Config(tau=1))

    def train(value: float) -> None:
        with torch.no_grad():
            weight.copy_(torch.full((3,), value))
        co2.step()

    for step in range(3):
        train(1 - step / 10)
    state, kept = co2.state_dict(), weight.detach().clone()
    with pytest.raises(DivergedError, match="every worker"):
        for _ in range(4):
            train(math.nan)
    with torch.no_grad():
        weight.copy_(kept)
    co2.load_state_dict(state) if how == "load" else co2.resync()
    for step in range(4):
        train(0.7 - step / 10)
    assert weight.isfinite().all()


def test_one_slow_round_lengthens_the_timeout_for_some_rounds_only(
    background: AsyncAllReduce, monkeypatch: pytest.MonkeyPatch
):
    given: list[float] = []
    monkeypatch.setattr(collectives, "set_timeout", lambda group, seconds: given.append(seconds - background.timeout))
    for late in (17.0, *[0.0] * collectives.RECENT):
        background._launched_at -= late  # as if a step had compiled for so long
        background.launch(iter([]))
        background.wait()
    assert all(17 <= more < 18 for more in given[: collectives.RECENT]) and given[-1] < 1


def test_a_failure_aborts_the_communicator(background: AsyncAllReduce, monkeypatch: pytest.MonkeyPatch):
    """Its kernels would wait for a dead peer, and whoever destroys it for them."""
    aborted: list[Any] = []
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: aborted.append(group), raising=False)
    group = background.group

    def fails() -> Iterator[collectives.Stage]:
        raise RuntimeError("NCCL error: remote process exited")
        yield

    with pytest.raises(CollectiveError, match="remote process exited"):
        background.launch(fails())
    assert aborted == [group]


def test_a_failure_ends_the_process_soon(background, monkeypatch):
    monkeypatch.delenv(groups.DUMP[0], raising=False)
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # this torch may have no NCCL
        groups.new_group(None, 5.0, torch.device("cuda"), "nccl")
    assert os.environ[groups.DUMP[0]] == groups.DUMP[1]


REHEARSED: dict[str, dict[str, Any]] = {
    "int4": {"compression": CompressionConfig("int4")},
    "lgreco int4": {"compression": CompressionConfig("lgreco", like="int4")},
    "lgreco rank2": {"compression": CompressionConfig("lgreco", like="rank2")},
    "sharded": {},
}


@on_ranks(2)
def test_a_rehearsal_changes_nothing(rank: int):
    """What NCCL ranks do before training, over gloo: two runs are equal bit for bit."""
    ends: dict[str, list[torch.Tensor]] = {name: [] for name in REHEARSED}
    for name, rehearses in itertools.product(REHEARSED, (False, True)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32))
        config = CO2Config(tau=2, **REHEARSED[name])
        _, method = make_method("co2", net, co2=config, shard=name == "sharded")
        if rehearses:
            method.allreduce.by_nccl = True
            method._rehearse()
            method.allreduce.by_nccl = False
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x in torch.randn(12, 8, 32, generator=torch.Generator().manual_seed(rank)):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            method.step()
        method.finish()
        ends[name].append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        method.close()
    assert all(torch.equal(*pair) for pair in ends.values())
