"""What a method holds on each GPU beyond the model, its gradients and the optimiser's state.

The method is made of tensors without memory. So outer state, the buffer in flight, error feedback's errors and merge
keep's copy are there as the method allocates them, and a reduction runs through its own stages, with collectives that
do nothing. At a boundary or a checkpoint a method takes one flat tensor more, at most: no peak,
for the gradients, which are as large, are gone by then, as are activations. Of CO2 whose outer state is shared out, the
shares are reckoned as in core/sharded/sharded.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import held as in_core
from core import outer
from core.assembly import plugged
from core.assembly.wire import WireConfig
from core.flat import Bucket
from core.flight import Flight
from core.lgreco import curves, senders
from core.lgreco.reducer import LGreco
from core.methods import gradient_wire, make_method
from core.reducer import Reducer
from core.rounds import Rounds
from core.wires import quantized
from training.recipe import Recipe

COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_to_all_single")


def size_of(params: Iterable[Tensor]) -> int:
    """Their bytes."""
    return sum(p.numel() * p.element_size() for p in params)


@dataclass(frozen=True)
class Held:
    """Bytes on each GPU beyond the model, its gradients and the optimiser's state."""

    always: float = 0.0
    staging: float = 0.0
    """While a reduction runs, beneath the local steps: what its stages encode, receive and decode."""


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, as long as they live; `held` were there before."""

    def __init__(self, held: list[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (storage := t.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def held(recipe: Recipe, model: nn.Module, node: int, workers: int, *, on_gpu: bool = True) -> Held:
    """Of one of `workers`, `node` of which synchronise every step. model: on the meta device. on_gpu: whether as much
    is encoded and updated at once as there, else as on a CPU."""
    trained = size_of(p for p in model.parameters() if p.requires_grad)
    parts = node if recipe.zero >= 2 else 1  # a worker holds such a part of the model alone
    if recipe.method == "zo":
        return Held(always=0.0 if recipe.offload else trained)  # the perturbed copy
    if recipe.offload:
        return Held()
    if recipe.method == "co2" and (node > 1 or recipe.shard):
        return _shared(recipe, trained / parts, node // parts, workers // node, on_gpu)
    if recipe.method == "ddp" and (recipe.ddp_wire.format == "float32" or workers == 1):
        return Held()
    found = count(recipe, model, workers // node if recipe.method != "ddp" else workers, on_gpu)
    return Held(found.always / parts, found.staging / parts)


def _shared(recipe: Recipe, trained: float, node: int, across: int, on_gpu: bool) -> Held:
    """Of ShardedCO2: g whole, and shares of x and m; gathering copies the own part, a share is updated by segments.

    node, across: workers among whom they are shared out, those of a node and, with shard, those across nodes. trained:
    bytes that a worker holds.
    """
    shares = node * (across if recipe.shard else 1)
    part = trained / node if node > 1 else trained / shares
    elements, segment = int(trained / shares) // 4, outer.GPU_SEGMENT if on_gpu else outer.SEGMENT
    m, delta = (torch.empty(min(segment, elements), device="meta") for _ in range(2))
    rule = outer.Rule(phi=recipe.co2.clip, c=m.norm() if recipe.co2.gap == "elementwise" else None)
    with Live([m, delta]) as live:
        for _ in range(1 + (elements > segment)):
            new, _ = outer.new_momentum(m, delta, rule)  # is there until the next segment's
        del new
    return Held(trained * (1 + 2 / shares), max(part if shares > 1 else 0.0, live.peak))


def count(recipe: Recipe, model: nn.Module, workers: int, on_gpu: bool) -> Held:
    """Of a method whose state is not shared out, among so many workers; see held."""
    with Live([*model.parameters(), *model.buffers()]) as live, _on_paper(workers, on_gpu):
        reducer, buckets, method = _made(recipe, model)
        always = live.peak = live.now
        for works in reducer.stages(object(), 1):  # noqa: B007  # pyright: ignore[reportArgumentType]
            pass
        if isinstance(reducer, LGreco) and not reducer.decider.fixed:
            _decides(reducer)
        staging = live.peak - always
        del works
    del method
    if recipe.elastic:  # what a worker has sent, until it has landed: core/elastic/joining.py
        always += sum(b.flat.nbytes for b in buckets)
    return Held(always, staging)


def _decides(reducer: LGreco) -> None:
    """What the worker wants to send of the largest layer, twice, on its way into the sum; its curves, of which those of
    low rank are thin. Then the switch, for which what error feedback holds moves over."""
    layer = max(reducer.layers, key=lambda layer: layer.numel)
    wanted = [torch.empty(layer.numel, device="meta") for _ in range(2)]
    del wanted[:]
    choices, number = reducer.decider.choices, reducer.layers.index(layer)
    offered = reducer.decider.offered[number].tolist()
    thick = [ok and choice.kind != "rank" for ok, choice in zip(offered, choices, strict=True)]
    curves.curve(reducer._sum_views()[number], layer, choices, thick, 0)
    reducer._switch(reducer.chosen)


def _made(recipe: Recipe, model: nn.Module) -> tuple[Reducer, list[Bucket], Any]:
    """The method's reducer, its flat tensors, and the method, which is to be kept as long as its bytes count."""
    if recipe.method == "ddp":
        wire = gradient_wire.GradientWire(model, recipe.ddp_wire, group=None, timeout=1.0, link=None)
        return wire.reducer, wire.buckets, wire
    _, method = make_method(
        recipe.method,
        model,
        co2=replace(recipe.co2, wire=WireConfig()) if recipe.elastic else recipe.co2,  # which takes float32
        average_buffers=recipe.average_buffers,
        **recipe.own_settings,
    )
    assert isinstance(method, Rounds)
    return method.reducer, method.buckets, method


@contextlib.contextmanager
def _on_paper(workers: int, on_gpu: bool) -> Iterator[None]:
    """In it methods are made as one of so many workers, alone and without memory, and collectives do nothing."""

    def background(device: torch.device, **_: Any) -> Flight:
        made = Flight(device)
        made.world_size = made.places = workers
        return made

    def work(*tensors: Any, **_: Any) -> Any:  # holds them as gloo's do until the next one
        return SimpleNamespace(tensors=tensors)

    there = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda *_: 0, get_world_size=lambda *_: workers)
    with contextlib.ExitStack() as patches:
        for owner, name, stand_in in (
            (plugged, "flight_over", lambda _: background),
            (plugged, "dist", there),
            (in_core, "check_inputs", lambda *_: None),  # without memory all parameters seem to share it
            (gradient_wire, "flight_over", lambda _: background),
            (LGreco, "due", lambda *_: False),  # what a decision needs: see count
            (quantized, "SEGMENT", quantized.GPU_SEGMENT if on_gpu else quantized.SEGMENT),
            (curves, "ROWS", curves.GPU_ROWS if on_gpu else curves.ROWS),
            *((module, "largest", lambda t, k: t.topk(k, sorted=False).indices) for module in (senders, curves)),
            (dist, "get_world_size", lambda *_: workers),
            *((dist, name, work) for name in COLLECTIVES if hasattr(dist, name)),
        ):
            patches.enter_context(mock.patch.object(owner, name, stand_in))
        yield
