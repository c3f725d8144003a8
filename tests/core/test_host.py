"""What crosses between a device and its host, with stand-ins for a GPU: copies, reads that wait, pinned memory."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, buckets, local_update
from core.buckets import on_device, pinned
from core.comm import AsyncAllReduce
from core.guards import workers
from core.outer import OuterStep
from tests import problems
from tests.dispatch import Operations
from tests.problems import refusal


def host_reads() -> Operations:
    """What would make the host wait for a GPU: reading a number from it, or copying one that was made here."""
    waits = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default
    return Operations(lambda func, *_: str(func) if func in waits else None)


@pytest.mark.parametrize("gap", ["elementwise", "norm", "none"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_round_reads_nothing_from_the_device(gap: Any, clip: float | None, monkeypatch: pytest.MonkeyPatch):
    """With the plain pass, which runs on a GPU where Triton is not installed; the one for CPUs reads its sums."""
    params = problems.odd_parameters()
    monkeypatch.setattr("core.co2.make_outer_step", lambda *flats, start=0, nesterov: OuterStep(*flats))
    config = CO2Config(tau=2, gap=gap, clip=clip, outer_lr=0.4)
    assert reads_in_rounds(CO2(params, config, buffers=[torch.zeros(3)]), params) == []


def test_a_round_of_shared_state_reads_nothing_and_keeps_its_numbers_in_place():
    """Its numbers are written in another stream than the one that reads them."""
    params = problems.odd_parameters()
    co2 = CO2(params, CO2Config(tau=2), shard=True)
    place = co2.fragments[0].numbers.data_ptr()
    assert reads_in_rounds(co2, params) == []
    assert place == co2.fragments[0].numbers.data_ptr()


def test_statistics_of_shared_state_go_off_before_what_follows_is_launched(monkeypatch: pytest.MonkeyPatch):
    """They lie in the memory of the background's stream, which takes it for something else once nobody refers to it."""
    params = problems.odd_parameters()
    co2 = CO2(params, CO2Config(tau=1), shard=True)
    monkeypatch.setattr("core.stats.read_blocks", lambda t: True)
    left: list[str] = []

    def launch(stages: Any) -> None:
        left.extend(name for name, value in vars(co2.stats).items() if isinstance(value, Tensor))
        AsyncAllReduce.launch(co2.allreduce, stages)

    monkeypatch.setattr(co2.allreduce, "launch", launch)
    problems.take_steps(co2, params, 0, range(4))
    assert left == [] and co2.stats.as_dict()["momentum_norm"] > 0


def reads_in_rounds(co2: CO2 | CO2, params: list[nn.Parameter]) -> list[str]:
    """As on a device: where reading is free, a worker that is not left out is spared a pass (stats.read_blocks)."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (buckets, local_update, workers):
            patch.setattr(module, "read_blocks", lambda t: True)
        problems.take_steps(co2, params, 0, range(4))  # the first rounds look where the parameters lie
        with host_reads() as reads:
            for _ in range(4):
                co2.step()
    return reads.seen


N = 1500  # float32: 6,000 bytes, of which a power of two is 8,192


class Cudart:
    """cudaHostRegister as the runtime has it; fails where `code` is not 0."""

    def __init__(self, patch: pytest.MonkeyPatch, code: int = 0):
        self.code, self.held, self.synchronised = code, dict[int, int](), False
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1 and address not in self.held
        self.held |= {address: nbytes} if not self.code else {}
        return self.code

    def synchronize(self, device: int) -> None:
        self.synchronised = True

    def cudaHostUnregister(self, address: int) -> int:
        assert self.synchronised, "a copy may be under way"
        del self.held[address]
        return 0


def test_pinned_memory_is_as_large_as_asked_for_and_given_back_with_its_last_view(monkeypatch: pytest.MonkeyPatch):
    cudart = Cudart(monkeypatch)
    held = pinned(N, torch.float32)
    assert (held == 0).all() and list(cudart.held.items()) == [(held.data_ptr(), 4 * N)]
    view = held[1:].view(-1)
    del held
    gc.collect()
    view.fill_(1.0)
    assert cudart.held, "a view is left"
    del view
    gc.collect()
    assert not cudart.held
    assert pinned(0, torch.float32).numel() == 0 and not cudart.held


def test_memory_that_cannot_be_pinned_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch):
    Cudart(monkeypatch, code=2)
    said = refusal(pinned, N, torch.float32)
    assert said.startswith("6000 bytes of the host's memory cannot be pinned") and said.endswith("leave out offload")


def test_a_flag_of_the_hosts_goes_along_with_a_kernel():
    """meta is another device than the host's."""
    copies = torch.ops.aten._to_copy, torch.ops.aten.copy_
    with Operations(lambda func, *_: func if func.overloadpacket in copies else None) as copied:
        flag = on_device(torch.tensor(True), torch.device("meta"))
    assert flag.device.type == "meta" and flag.dtype == torch.bool and not copied.seen
    here = torch.tensor(False)
    assert on_device(here, here.device) is here
