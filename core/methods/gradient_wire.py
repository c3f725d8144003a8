"""DistributedDataParallel's gradients in a narrow wire format: a communication hook around the reducers of CO2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..assembly.wire import WireConfig
from ..checkpoints.saved import on_host
from ..errors import UserError
from ..flat import Scalars, copy, make_buckets
from ..robust import peers
from ..testing.link import Link, flight_over

EVERY, FIRST = 100, 10  # steps, of lgreco; released: every 100 after 1,000


def _by_steps(wire: WireConfig) -> WireConfig:
    """With L-GreCo's period in steps of ddp, where it is left open."""
    if wire.format != "lgreco":
        return wire
    own = wire.lgreco
    return replace(wire, lgreco=replace(own, every=own.every or EVERY, first=own.first or FIRST))


class GradientWire:
    """Averages the gradients of all buckets of DistributedDataParallel at once, when the last one is there.

    wire: not float32. What has to be chosen or rounded for the whole model waits for the whole backward pass, so
    nothing crosses under it. Where a step's gradients are not finite, as with a GradScaler that finds its scale, error
    feedback forgets what it holds of them.
    """

    def __init__(
        self, model: nn.Module, wire: WireConfig, *, group: dist.ProcessGroup | None, timeout: float, link: Link | None
    ):
        params = [p for p in model.parameters() if p.requires_grad]
        wire.check(params, group)
        self._scalars = Scalars({"steps": 1, "weight": 1})
        self.buckets = make_buckets(params, [], self._scalars.numel)
        self._scalars.attach(self.buckets[0].scalars)
        device = self.buckets[0].flat.device
        self.flight = flight_over(link)(device, group=group, timeout=timeout, hidden=False, roll=peers)
        workers = self.flight.rank, self.flight.world_size
        self.reducer = _by_steps(wire).reducer(self.buckets, self._scalars, *workers)
        pairs = [(p, view) for b in self.buckets for p, view in zip(b.params, b.payload_views, strict=True)]
        self._views = {id(p): view for p, view in pairs}
        self._waiting: list[tuple[Any, Tensor, list[Tensor], list[Tensor]]] = []

    def hook(self, _, bucket):  # DDP wants no annotation, or types it can evaluate
        """Its communication hook: the futures of all buckets are set by the last one."""
        gradients, views = bucket.gradients(), [self._views[id(p)] for p in bucket.parameters()]
        copy(views, gradients)
        devices = [gradients[0].device] if gradients[0].is_cuda else None
        future = torch.futures.Future(devices=devices)
        self._waiting.append((future, bucket.buffer(), gradients, views))
        if bucket.is_last():
            self._reduce()
        return future

    @torch.no_grad()
    def _reduce(self) -> None:
        self._scalars.set("steps", 1.0)
        self._scalars.set("weight", 1.0)
        background = self.flight
        background.launch(self.reducer.stages(background.group, background.launched + 1))
        background.wait()
        for flat in (f for flats in self.reducer.state.values() for f in flats):
            flat.nan_to_num_(0.0, 0.0, 0.0)
        waiting, self._waiting = self._waiting, []
        for future, buffer, gradients, views in waiting:
            copy(gradients, views)
            future.set_result(buffer)

    def state_dict(self) -> dict[str, Any]:
        """This worker's alone, in the host's memory."""
        state = {name: on_host(flats) for name, flats in self.reducer.state.items()}
        return {"reducer": state, "launched": self.flight.launched, "workers": self.flight.world_size}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of another number of workers nothing but the count goes on, as with CO2: what was held back is lost."""
        self.flight.restore(state["launched"], False)
        if state["workers"] != self.flight.world_size:
            return
        here, saved = self.reducer.state, state["reducer"]
        shapes = [{name: [len(f) for f in flats] for name, flats in each.items()} for each in (saved, here)]
        if shapes[0] != shapes[1]:
            raise UserError(
                "the checkpoint's gradients were sent with another ddp_wire: resume with the one that wrote it"
            )
        for name, flats in here.items():
            copy(flats, saved[name])
