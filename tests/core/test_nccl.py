"""What the NCCL path relies on, with stand-ins that behave as torch documents; no CUDA device is needed.

torch on Work.wait for NCCL: without a timeout the current stream waits for the collective and the host does not; with a
timeout the host waits until the collective has completed.
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import UserError, collectives, groups
from core.collectives import Background
from core.testing import run_distributed

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
    """Stands for SideStream; counts how often the computation was made to wait for it."""

    def __init__(self, device: torch.device):
        self.inside, self.joined = 0, 0

    def __enter__(self) -> None:
        self.inside += 1

    def __exit__(self, *error: object) -> None:
        self.inside -= 1

    def join(self) -> None:
        self.joined += 1


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    monkeypatch.setattr(collectives, "SideStream", FakeStream)
    monkeypatch.setattr(collectives, "moved_by_nccl", lambda group, device: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Background(torch.device("cpu"))
    dist.destroy_process_group()


def stages(background: Background, starting: float = 0.0) -> Iterator[groups.Stage]:
    for _ in range(2):
        side: Any = background._side
        assert side.inside == 1, "the stages must be queued in the stream of their own"
        time.sleep(starting)
        yield [NcclWork()], 100


def test_neither_launch_nor_wait_blocks_the_host(background: Background):
    began = time.perf_counter()
    background.launch(stages(background))
    assert background.done()
    background.wait()
    assert time.perf_counter() - began < SECONDS / 2, "the host waited for a collective that has not ended"
    side: Any = background._side
    assert side.joined == 1 and background.bytes_sent == 200
    assert float(background.exposed) < SECONDS / 2


def test_a_sum_at_once_leaves_the_time_of_the_last_reduction_alone(background: Background):
    """That time lies between two events of a device: the host's clock cannot be set against them."""
    background.launch(stages(background))
    background.wait()
    seconds = background.seconds
    background.sum([torch.ones(2)])
    assert background.seconds == seconds


def test_a_host_that_is_held_up_while_launching_is_exposed(background: Background):
    background.launch(stages(background, starting=0.2))
    time.sleep(0.2)  # local steps: not exposed
    background.wait()
    assert 0.4 <= float(background.exposed) < 0.6


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
    assert collectives.moved_by_nccl(group, torch.device(device)) is (device == "cuda" and backend == "nccl")


def test_nccls_collectives_hold_few_multiprocessors_at_high_priority(monkeypatch: Any):
    class Options:
        def __init__(self) -> None:
            self.is_high_priority_stream, self.config = False, SimpleNamespace(max_ctas=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options = groups._nccl_options()
    assert options.is_high_priority_stream and options.config.max_ctas == groups.MAX_CTAS


def without_a_backend_for_it(rank: int, world_size: int) -> str:
    with pytest.raises(UserError) as caught:
        Background(torch.device("meta"))
    return str(caught.value)


def test_a_group_that_cannot_move_the_tensors_is_refused_with_the_remedy():
    (text,) = run_distributed(without_a_backend_for_it, 1)
    assert "moves no meta tensors" in text and "cpu:gloo,cuda:nccl" in text and "\n" not in text
