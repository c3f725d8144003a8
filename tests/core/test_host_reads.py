"""A round reads nothing from the device, so that the host need not wait for it; no CUDA device is needed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core import CO2, CO2Config, ShardedCO2, flat
from core.adaptive.merging import MergingBoundary
from core.flight import Flight
from core.robust import guard
from tests import problems


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: reading a number from it, or copying one that was made here.
    more: other calls that would where they are made."""

    def __init__(self, *more: Any) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default, *more)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._waits:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gap", ["elementwise", "norm", "none"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_round_reads_nothing_from_the_device(gap: Any, clip: float | None, monkeypatch: pytest.MonkeyPatch):
    """With the plain pass, which runs on a GPU where Triton is not installed; the one for CPUs reads its sums."""
    params = problems.odd_parameters()
    monkeypatch.setattr("core.adaptive.merging.make_boundary", MergingBoundary)
    config = CO2Config(tau=2, gap=gap, clip=clip, outer_lr=0.4)
    assert reads_in_rounds(CO2(params, config, buffers=[torch.zeros(3)]), params) == []


def test_a_round_of_shared_state_reads_nothing_and_keeps_its_numbers_in_place():
    """Its numbers are written in another stream than the one that reads them."""
    params = problems.odd_parameters()
    co2 = ShardedCO2(params, CO2Config(tau=2), shard=True)
    places = co2._last.data_ptr(), co2._m_squares.data_ptr()
    assert reads_in_rounds(co2, params) == []
    assert places == (co2._last.data_ptr(), co2._m_squares.data_ptr())


def test_statistics_of_shared_state_go_off_before_what_follows_is_launched(monkeypatch: pytest.MonkeyPatch):
    """They lie in the memory of the background's stream, which takes it for something else once nobody refers to it."""
    params = problems.odd_parameters()
    co2 = ShardedCO2(params, CO2Config(tau=1), shard=True)
    monkeypatch.setattr("core.stats.read_blocks", lambda t: True)
    left: list[str] = []

    def launch(stages: Any) -> None:
        left.extend(name for name, value in vars(co2.stats).items() if isinstance(value, Tensor))
        Flight.launch(co2.flight, stages)

    monkeypatch.setattr(co2.flight, "launch", launch)
    problems.take_steps(co2, params, 0, range(4))
    assert left == [] and co2.stats.as_dict()["momentum_norm"] > 0


def reads_in_rounds(co2: CO2 | ShardedCO2, params: list[nn.Parameter]) -> list[str]:
    """As on a device: where reading is free, a worker that is not left out is spared a pass (flat.read_blocks)."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (flat, guard):
            patch.setattr(module, "read_blocks", lambda t: True)
        problems.take_steps(co2, params, 0, range(4))  # the first rounds look where the parameters lie
        with HostReads() as reads:
            for _ in range(4):
                co2.step()
    return reads.seen
