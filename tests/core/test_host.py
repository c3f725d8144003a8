"""What crosses between a device and its host, with stand-ins for a GPU: copies, reads that wait, pinned memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, CompressionConfig, buckets, local_update, make_method
from core.buckets import on_device, pinned
from core.comm import AsyncAllReduce
from core.guards import workers
from core.outer import OuterStep
from tests import problems
from tests.dispatch import Operations
from tests.problems import refusal

SIZE = 3000
LIKE_RECOMMENDED = {"tau": 2, "outer_momentum": 0.0, "gap": "none", "clip": None, "merge": "keep_local", "delay": 1}
METHODS: dict[str, Callable[[list[Tensor]], Any]] = {
    "the paper's": lambda p: CO2(p, CO2Config(tau=2)),
    "as recommended": lambda p: CO2(p, CO2Config(**LIKE_RECOMMENDED, compression=CompressionConfig("int4"))),
    "lgreco": lambda p: CO2(p, CO2Config(tau=2, compression=CompressionConfig("lgreco", like="int4"))),
    "shared": lambda p: CO2(p, CO2Config(tau=2), shard=True),
    "nesterov": lambda p: CO2(p, CO2Config(tau=2, nesterov=True)),
    "ddp": lambda p: make_method("ddp", nn.ParameterList(p))[1],
}


def device_copies() -> Operations:
    """Stands in for a GPU's allocator: how many flat tensors lie on the device whenever an operation makes one there,
    as all do but a copy to("cpu")."""
    living: weakref.WeakSet[Any] = weakref.WeakSet()

    def see(func: Any, args: Any, kwargs: Any, made: Any) -> int | None:
        to_host = func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
        if not isinstance(made, Tensor) or made.numel() < SIZE or to_host or made._is_view():
            return None
        living.add(made.untyped_storage())
        return len(living)

    return Operations(see)


@pytest.mark.parametrize("name", METHODS)
def test_at_most_one_flat_tensor_is_copied_on_the_device(name: str):
    params: list[Tensor] = [nn.Parameter(torch.linspace(-1, 1, SIZE))]
    method = METHODS[name](params)
    for _ in range(5):
        with torch.no_grad():
            params[0].mul_(0.9)
        method.step()
    with device_copies() as copies:
        state = method.state_dict()
    with device_copies() as back:
        method.load_state_dict(state)
    assert max([*copies.seen, *back.seen, 0]) <= 1


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


def offloaded() -> tuple[CO2, list[Tensor], Tensor]:
    params: list[Tensor] = [nn.Parameter(torch.linspace(-1, 1, N)), nn.Parameter(torch.ones(7))]
    buffer = torch.zeros(5)
    return CO2(params, CO2Config(tau=2), buffers=[buffer], offload=True), params, buffer


def test_buffers_of_an_offloaded_model_cross_without_a_wait():
    """Copies from and to the buffer and what is sent of it, and whether the host would wait for them."""
    co2, params, buffer = offloaded()
    memory = {t.untyped_storage().data_ptr() for t in (buffer, co2._own_buffers[0][1][0])}

    def waits(func: Any, args: Any, kwargs: Any, made: Any) -> bool | None:
        if func.overloadpacket not in (torch.ops.aten._foreach_copy_, torch.ops.aten.copy_):
            return None
        to, source = (list(t) if isinstance(t, list | tuple) else [t] for t in args[:2])
        touched = any(t.untyped_storage().data_ptr() in memory for t in [*to, *source])
        return not (len(args) > 2 and args[2]) if touched else None

    with torch.no_grad(), Operations(waits) as copies:
        for step in range(8):
            buffer.fill_(step)
            params[0].mul_(0.9)
            co2.step()
    within = 4  # from the buffer to what is kept of it, on the device, at each boundary
    assert len(copies.seen) > within and sum(copies.seen) == within


def test_a_flag_of_the_hosts_goes_along_with_a_kernel():
    """meta is another device than the host's."""
    copies = torch.ops.aten._to_copy, torch.ops.aten.copy_
    with Operations(lambda func, *_: func if func.overloadpacket in copies else None) as copied:
        flag = on_device(torch.tensor(True), torch.device("meta"))
    assert flag.device.type == "meta" and flag.dtype == torch.bool and not copied.seen
    here = torch.tensor(False)
    assert on_device(here, here.device) is here
