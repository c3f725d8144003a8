"""state_dict() copies to the host's memory a flat tensor at a time: a GPU has no room for a second outer state."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core import CO2, CO2Config, ShardedCO2, WireConfig, make_method
from core.methods import DelayedCO2, DelayedConfig

SIZE = 3000
LIKE_RECOMMENDED = {"tau": 2, "outer_momentum": 0.0, "gap": "none", "clip": None, "merge": "keep", "delay": 1}
METHODS: dict[str, Callable[[list[Tensor]], Any]] = {
    "the paper's": lambda p: CO2(p, CO2Config(tau=2)),
    "as recommended": lambda p: CO2(p, CO2Config(**LIKE_RECOMMENDED, wire=WireConfig("int4"))),
    "lgreco": lambda p: CO2(p, CO2Config(tau=2, wire=WireConfig("lgreco", like="int4"))),
    "shared": lambda p: ShardedCO2(p, CO2Config(tau=2), shard=True),
    "nesterov": lambda p: DelayedCO2(p, CO2Config(tau=2), DelayedConfig(nesterov=True)),
    "ddp": lambda p: make_method("ddp", nn.ParameterList(p))[1],
}


class DeviceCopies(TorchDispatchMode):
    """Stands in for a GPU's allocator: what an operation makes lies on the device, but for a copy to("cpu").

    Attributes: most, flat tensors that lay there at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._living: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        to_host = func is torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
        if isinstance(made, Tensor) and made.numel() >= SIZE and not to_host and not made._is_view():
            self._living.add(made.untyped_storage())
            self.most = max(self.most, len(self._living))
        return made


@pytest.mark.parametrize("name", METHODS)
def test_at_most_one_flat_tensor_is_copied_on_the_device(name: str):
    params: list[Tensor] = [nn.Parameter(torch.linspace(-1, 1, SIZE))]
    method = METHODS[name](params)
    for _ in range(5):
        with torch.no_grad():
            params[0].mul_(0.9)
        method.step()
    with DeviceCopies() as copies:
        state = method.state_dict()
    assert copies.most <= 1
    with DeviceCopies() as copies:
        method.load_state_dict(state)
    assert copies.most <= 1


def test_a_device_copy_is_seen():
    with DeviceCopies() as copies:
        held = [torch.ones(SIZE).clone() for _ in range(3)]
        torch.ones(SIZE).to("cpu", copy=True)
    assert len(held) == 3 and copies.most == 4
