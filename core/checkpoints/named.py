"""States by parameter names, where torch numbers an optimizer's parameters, and with local tensors for DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..flat import is_dtensor


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Returns the optimizer's state_dict with a name in place of each number."""
    state = optimizer.state_dict()
    names = _numbered(optimizer, model)
    return state | {"state": {names[number]: values for number, values in state["state"].items()}}


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Restores what of_optimizer returned. Tensors of sharded parameters are this worker's shards."""
    params = dict(model.named_parameters())
    numbers = {name: number for number, name in enumerate(_numbered(optimizer, model))}
    values = {
        numbers[name]: {key: as_shard(value, params.get(name)) for key, value in of_one.items()}
        for name, of_one in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": values})


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Restores model.state_dict(). Tensors of sharded parameters are this worker's shards."""
    here = model.state_dict()
    model.load_state_dict({name: as_shard(value, here.get(name)) for name, value in state.items()})


def as_shard(value: Any, like: Any) -> Any:
    """Returns this worker's shard of something sharded as `like` as a DTensor; anything else as it is."""
    if not (is_dtensor(like) and isinstance(value, Tensor) and value.shape == like.to_local().shape):
        return value
    shard = value.to(like.to_local())
    place = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like).from_local(shard, like.device_mesh, like.placements, **place)


def _numbered(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Returns the parameters' names in the order of its state_dict; with ZeRO-1 those whose state is kept here."""
    names = {id(p): name for name, p in model.named_parameters()}
    params = [p for group in getattr(optimizer, "optim", optimizer).param_groups for p in group["params"]]
    if strangers := sum(id(p) not in names for p in params):
        raise UserError(
            f"the optimiser has {strangers} parameters that the model lacks: give one module that holds all, such as "
            "an nn.ModuleList"
        )
    return [names[id(p)] for p in params]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's global generators: the host's, and the GPU's if the model is on one."""
    on_gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | on_gpu


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restores what random_state returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
