"""States by the names of the model's parameters, and of shards by this worker's own: torch numbers an optimiser's
parameters, and DTensors go into a checkpoint as local tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..flat import is_dtensor


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The optimiser's state_dict with a name in place of each number."""
    state = optimizer.state_dict()
    names = _numbered(optimizer, model)
    return state | {"state": {names[number]: values for number, values in state["state"].items()}}


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Restores what of_optimizer returned, whose tensors are this worker's shards where a parameter is one."""
    params = dict(model.named_parameters())
    numbers = {name: number for number, name in enumerate(_numbered(optimizer, model))}
    values = {
        numbers[name]: {key: as_shard(value, params.get(name)) for key, value in of_one.items()}
        for name, of_one in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": values})


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Restores model.state_dict(), whose tensors are this worker's shards where the model's are."""
    here = model.state_dict()
    model.load_state_dict({name: as_shard(value, here.get(name)) for name, value in state.items()})


def as_shard(value: Any, like: Any) -> Any:
    """A tensor that is this worker's shard of something sharded as `like`, as a DTensor; anything else as it is."""
    if not (is_dtensor(like) and isinstance(value, Tensor) and value.shape == like.to_local().shape):
        return value
    shard = value.to(like.to_local())
    place = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like).from_local(shard, like.device_mesh, like.placements, **place)


def _numbered(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of its parameters in the order of its state_dict; with ZeRO-1 of those whose state is kept here."""
    names = {id(p): name for name, p in model.named_parameters()}
    own = getattr(optimizer, "optim", optimizer)
    if strangers := sum(id(p) not in names for group in own.param_groups for p in group["params"]):
        raise UserError(
            f"the optimiser has {strangers} parameters that the model lacks: give one module that holds all, such as "
            "an nn.ModuleList"
        )
    return [names[id(p)] for group in own.param_groups for p in group["params"]]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's global generators: the host's, and the GPU's where the model is on one."""
    return {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    )


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Continues from random_state's."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
