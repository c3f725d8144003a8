"""What a run needs on each GPU: counted from the recipe, but for what two things themselves tell.

Activations: the task's own step, forward and backward, on a worker's micro-batch, of fake tensors, which have shapes
but no memory; the peak of what would be alive is taken. Autocast and attention are as on a GPU: norms and softmax in
float32, fused attention.

The method: it is made of tensors without memory, too. So outer state, the buffer in flight, what error feedback holds
back and what merge keep has sent are there as the method allocates them, and a reduction runs through its own stages,
with collectives that do nothing. At a boundary or a checkpoint a method takes one flat tensor more, at most: no peak,
for the gradients, which are as large, are gone by then, as are activations. Of CO2 whose outer state is shared out, the
shares are reckoned as in core/sharded/sharded.py.

Not counted: the CUDA context, NCCL's and cuDNN's buffers and what fragmentation costs, together RESERVE.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import held as in_core
from core import outer
from core.assembly import plugs
from core.assembly.wire import WireConfig
from core.flat import Bucket
from core.flight import Flight
from core.lgreco import curves, senders
from core.lgreco.reducer import LGreco
from core.methods import CO2Config, gradient_wire, make_method
from core.reducer import Reducer
from core.rounds import Rounds
from core.sharded.mesh import local_world_size
from core.wires import quantized
from training.recipe import Recipe
from training.sampling import per_worker

GIB = 1 << 30  # bytes; a GPU that is sold with 24 GB has 24 GiB
RESERVE = 1.5 * GIB
COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_to_all_single")
# what CUDA's autocast computes in float32 and the CPU's does not
IN_FLOAT32 = (
    *((F, name) for name in ("layer_norm", "group_norm", "softmax")),
    *((owner, name) for owner in (torch, Tensor) for name in ("softmax", "pow")),
)

# (in place of a Run, recipe, model, samples of this worker): makes a batch and adds one step's gradient
Backward = Callable[["Step", Any, nn.Module, int], Any]


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU, by what they are for."""

    parameters: float
    gradients: float
    optimizer: float
    method: float
    staging: float
    """The method's, while a reduction runs under the local steps."""
    buckets: float
    """DDP's copy of the gradients, where workers synchronise every step."""
    activations: float
    """And what else the peak of a step has beyond the gradients: temporaries, parameters that FSDP gathered."""

    @property
    def total(self) -> float:
        return sum(vars(self).values()) + RESERVE


@dataclass(frozen=True)
class Step:
    """What a task's backward pass needs of a Run."""

    device: torch.device
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]


def estimate(recipe: Recipe, build_model: Callable[[], nn.Module], backward: Backward, world_size: int) -> Memory:
    """Of one of world_size workers. per_node 0 takes the workers of this machine, as in a run."""
    with torch.device("meta"):
        model = build_model()
    node = recipe.per_node or local_world_size()
    size = size_of(model.parameters())
    trained = size_of(p for p in model.parameters() if p.requires_grad)
    shard = trained / (node if recipe.zero >= 2 else 1)
    method = held(recipe, model, node, world_size)
    zeroth_order = recipe.method == "zo"
    # Muon has one moment for its matrices, two for the rest: two is the bound
    moments = {"sgd": 1 if recipe.optim.momentum else 0}.get(recipe.optim.name, 2)
    synchronises = world_size > 1 and recipe.zero < 2 and (recipe.method in ("ddp", "auto") or node > 1)
    return Memory(
        parameters=streamed(model) if zeroth_order and recipe.offload else size / (node if recipe.zero >= 2 else 1),
        gradients=0.0 if zeroth_order else shard,
        optimizer=moments * trained / (node if recipe.zero else 1),
        method=method.always,
        staging=method.staging,
        buckets=shard if synchronises else 0.0,
        activations=gathered(recipe, model) + measure(recipe, model, backward, world_size),
    )


def size_of(params: Iterable[Tensor]) -> int:
    """Their bytes."""
    return sum(p.numel() * p.element_size() for p in params)


def gathered(recipe: Recipe, model: nn.Module) -> float:
    """Bytes of whole parameters and gradients that FSDP holds at once (training.zero.shard_model).

    ZeRO-2: all parameters; ZeRO-3: two blocks' and those outside blocks. Gradients of as many, and what is reduced.
    """
    if recipe.zero < 2:
        return 0.0
    size = 2 if recipe.precision == "bfloat16" else 4
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    whole = sum(p.numel() for p in model.parameters())
    few = whole - sum(blocks) + 2 * max(blocks, default=0)
    return size * (few if recipe.zero == 3 else whole) + (size + 4) * few


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """All modules that stand in lists."""
    return [block for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]


def streamed(model: nn.Module) -> float:
    """Bytes of what core.zeroth.blocks.BlockStream holds: three blocks, what belongs to none, and where the largest
    module of that has more than a block, its perturbed copy."""
    blocks = [size_of(block.parameters()) for block in blocks_of(model)]
    block = max(blocks, default=0)
    alone = max((size_of(m.parameters(recurse=False)) for m in model.modules()), default=0)
    return size_of(model.parameters()) - sum(blocks) + 3 * block + (alone if alone > block else 0)


def measure(recipe: Recipe, model: nn.Module, backward: Backward, world_size: int) -> float:
    """The peak of what a step keeps alive beyond parameters and gradients, in bytes."""
    fsdp = recipe.zero >= 2
    share = per_worker(recipe.batch_size, recipe.data_workers(world_size))
    parts = min(recipe.accumulate, 2)  # the second meets the first one's gradients
    part = -(-share // recipe.accumulate)
    mixed = recipe.precision == "bfloat16"
    step = Step(torch.device("cpu"), lambda: torch.autocast("cpu", torch.bfloat16, enabled=mixed))
    if fsdp and mixed:
        model = model.bfloat16()  # as shard_model gathers it
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        if fsdp:  # a gradient is reduced and freed when it is there
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with as_on_gpu(), Live([*model.parameters(), *model.buffers()]) as live:
            backward(step, replace(recipe, accumulate=parts), model, min(share, parts * part))
    return max(0.0, live.peak - (0 if fsdp else size_of(model.parameters())))


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """What autocast computes in float32 on a GPU alone; attention without dropout, so that the CPU's is fused, too."""

    def in_float32(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return function(*args, **kwargs)

    def fused(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **{**kwargs, "dropout_p": 0.0})

    changes = [(owner, name, in_float32) for owner, name in IN_FLOAT32]
    with contextlib.ExitStack() as patches:
        for owner, name, change in [*changes, (F, "scaled_dot_product_attention", fused)]:
            original = getattr(owner, name)
            # a function, not a partial: as a method of Tensor it must take self
            patched = functools.wraps(original)(lambda *a, _f=original, _change=change, **k: _change(_f, *a, **k))
            patches.enter_context(mock.patch.object(owner, name, patched))
        yield


def lines(memory: Memory, recipe: Recipe) -> Iterator[str]:
    """A line with what each part takes, and a warning where it exceeds recipe.gpu_gb."""
    gb = {name: f"{value / GIB:.1f}" for name, value in vars(memory).items()}
    buckets = f", DDP's buckets {gb['buckets']}" if memory.buckets else ""
    staging = f" and {gb['staging']} in a reduction" if memory.staging else ""
    yield (
        f"{memory.total / GIB:.1f} GiB a GPU: parameters {gb['parameters']}, gradients {gb['gradients']}, optimiser "
        f"{gb['optimizer']}, {recipe.method} {gb['method']}{staging}{buckets}, activations {gb['activations']}, "
        f"{RESERVE / GIB:.1f} for CUDA"
    )
    if recipe.gpu_gb is not None and memory.total > recipe.gpu_gb * GIB:
        yield (
            f"warning: gpu_gb={recipe.gpu_gb:g} is less: more --accumulate, --recompute or --zero need less, as do "
            "--shard of co2, --offload of co2 and zo, wire.format float32, and of co2 merge outer or mix"
        )


# -- the method -----------------------------------------------------------------------------------------------------


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
    if recipe.method == "auto":  # what both need, until it goes over
        parts = replace(recipe, method="co2"), replace(recipe, method="ddp", ddp_wire=recipe.auto.wire, co2=CO2Config())
        co2, ddp = (held(part, model, node, workers, on_gpu=on_gpu) for part in parts)
        return Held(co2.always + ddp.always, max(co2.staging, ddp.staging))
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
            (plugs, "flight_over", lambda _: background),
            (plugs, "dist", there),
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
