"""The host's memory beside a GPU, whose runtime a stand-in replaces: what is pinned, and what waits for a copy."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core import CO2Config, ShardedCO2
from core.sharded.live import beside, pinned
from tests.problems import refusal

N = 1500  # float32: 6,000 bytes, of which a power of two is 8,192


class Cudart:
    """cudaHostRegister as the runtime has it; fails where `code` is not 0."""

    def __init__(self, code: int = 0):
        self.code = code
        self.held: dict[int, int] = {}
        self.most, self.synchronised = 0, False
        self.there_until_then = True

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1 and address not in self.held
        if not self.code:
            self.held[address] = nbytes
            self.most = max(self.most, sum(self.held.values()))
        return self.code

    def synchronize(self, device: int) -> None:
        assert device == 0
        self.synchronised = True

    def cudaHostUnregister(self, address: int) -> int:
        assert self.synchronised, "a copy may be under way"
        self.there_until_then &= is_mapped(address)
        del self.held[address]
        return 0


def is_mapped(address: int) -> bool:
    """Whether the process has memory there."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


def stand_in(patch: pytest.MonkeyPatch, code: int = 0) -> Cudart:
    cudart = Cudart(code)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "cudart", lambda: cudart)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "synchronize", cudart.synchronize)
    return cudart


def test_pinned_memory_is_as_large_as_asked_for_and_given_back_with_its_last_view(monkeypatch: pytest.MonkeyPatch):
    cudart = stand_in(monkeypatch)
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


def test_pinned_memory_is_there_until_nothing_is_queued_that_uses_it(monkeypatch: pytest.MonkeyPatch):
    cudart = stand_in(monkeypatch)
    held = pinned(1 << 24, torch.uint8)  # of a mapping of its own
    assert is_mapped(held.data_ptr())
    del held
    gc.collect()
    assert not cudart.held and cudart.there_until_then


def test_memory_that_cannot_be_pinned_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch):
    stand_in(monkeypatch, code=2)
    said = refusal(pinned, N, torch.float32)
    assert said.startswith("6000 bytes of the host's memory cannot be pinned") and said.endswith("leave out offload")


def offloaded() -> tuple[ShardedCO2, list[Tensor], Tensor]:
    params: list[Tensor] = [nn.Parameter(torch.linspace(-1, 1, N)), nn.Parameter(torch.ones(7))]
    buffer = torch.zeros(5)
    return ShardedCO2(params, CO2Config(tau=2), buffers=[buffer], offload=True), params, buffer


def test_offloaded_state_pins_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    """The flat tensor, and a copy of the parameters."""
    cudart = stand_in(monkeypatch)
    co2, params, _ = offloaded()
    wanted = co2.buckets[0].flat.nbytes + sum(p.nbytes for p in params)
    assert sum(cudart.held.values()) == cudart.most == wanted
    del co2, params
    gc.collect()
    assert not cudart.held


class Copies(TorchDispatchMode):
    """Copies into, and from, tensors of some memory, and whether the host would wait for them between a GPU and it."""

    def __init__(self, *memory: Tensor):
        super().__init__()
        self._memory = {t.untyped_storage().data_ptr() for t in memory}
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._foreach_copy_, torch.ops.aten.copy_):
            to, source = (list(t) if isinstance(t, list | tuple) else [t] for t in args[:2])
            if any(t.untyped_storage().data_ptr() in self._memory for t in [*to, *source]):
                self.waits.append(not (len(args) > 2 and args[2]))
        return func(*args, **(kwargs or {}))


def test_buffers_of_an_offloaded_model_cross_without_a_wait():
    co2, params, buffer = offloaded()
    own = co2._own_buffers[0][0]
    with torch.no_grad(), Copies(buffer, own) as copies:
        for step in range(8):
            buffer.fill_(step)
            params[0].mul_(0.9)
            co2.step()
    within = 4  # from the buffer to what is kept of it, on the device, at each boundary
    assert len(copies.waits) > within and sum(copies.waits) == within


class Converted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


def test_a_flag_of_the_hosts_goes_along_with_a_kernel():
    """meta is another device than the host's."""
    with Converted() as copies:
        flag = beside(torch.tensor(True), torch.device("meta"))
    assert flag.device.type == "meta" and flag.dtype == torch.bool and not copies.count
    here = torch.tensor(False)
    assert beside(here, here.device) is here
