"""A run's state by the names of the model's parameters, and back: torch numbers those of an optimiser, and a method has
theirs one after the other in flat tensors (core.flat.Bucket)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.checks import of_rank, under_rank
from core.flat import Bucket, views
from core.methods import Method
from core.rounds import LocalMethod


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
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.to_local().shape):
        return value
    shard = value.to(like.to_local())
    place = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(shard, like.device_mesh, like.placements, **place)


def of_method(method: Method, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The method's state_dict with {name: tensor} for each flat tensor; what lies behind the parameters is under "".
    What its reducer keeps has an order of its own, and stays as it is."""
    if not isinstance(method, LocalMethod):
        return state
    ((rank, own),) = state.items()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    names = {id(p): name for p, name in zip(method.params, trained, strict=True)}
    flats = own["state"]
    kept = flats | {key: _by_name(flats[key], method.buckets, names) for key in method.state}
    return {rank: own | {"state": kept, "flats": _by_name(own["flats"], method.buckets, names)}}


def flat_of_method(method: Method, state: dict[str, Any]) -> dict[str, Any]:
    """What of_method was given, from what it returned."""
    if not isinstance(method, LocalMethod):
        return state
    own = of_rank(state)
    kept = {key: _flat(flats) for key, flats in own["state"].items()}
    return under_rank(own | {"state": kept, "flats": _flat(own["flats"])})


def _numbered(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of its parameters in the order of its state_dict; with ZeRO-1 of those whose state is kept here."""
    names = {id(p): name for name, p in model.named_parameters()}
    own = getattr(optimizer, "optim", optimizer)
    return [names[id(p)] for group in own.param_groups for p in group["params"]]


def _by_name(flats: Sequence[Tensor], buckets: Sequence[Bucket], names: dict[int, str]) -> list[dict[str, Tensor]]:
    """Shares that are cut across parameters stay whole."""
    found = []
    for flat, bucket in zip(flats, buckets, strict=True):
        whole = len(flat) >= bucket.numel
        params = bucket.params if whole else []
        pieces = zip(params, views(flat, params), strict=True)
        rest = flat[bucket.numel :] if whole else flat
        found.append({names[id(p)]: piece for p, piece in pieces} | ({"": rest} if len(rest) else {}))
    return found


def _flat(found: list[Any]) -> list[Tensor]:
    """found: {name: tensor} each, or a reducer's tensors."""
    return [t if isinstance(t, Tensor) else _joined(list(t.values())) for t in found]


def _joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in pieces]) if pieces else torch.empty(0)
