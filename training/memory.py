"""What a run needs on each GPU: counted from the recipe, but for activations and the method.

Activations: the task's own step, forward and backward, runs on a worker's micro-batch of fake tensors, which have
shapes but no memory; the peak of all that would be alive is taken. Autocast and attention are as on a GPU: norms and
softmax in float32, fused attention. The method: training/method_memory.py.

Not counted: the CUDA context, NCCL's and cuDNN's buffers and what fragmentation costs, together RESERVE.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from core.sharded.mesh import local_world_size
from training.method_memory import Live, held, size_of
from training.recipe import Recipe
from training.sampling import per_worker

GIB = 1 << 30  # bytes; a GPU that is sold with 24 GB has 24 GiB
RESERVE = 1.5 * GIB
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
    synchronises = world_size > 1 and recipe.zero < 2 and (recipe.method == "ddp" or node > 1)
    return Memory(
        parameters=streamed(model) if zeroth_order and recipe.offload else size / (node if recipe.zero >= 2 else 1),
        gradients=0.0 if zeroth_order else shard,
        optimizer=moments * trained / (node if recipe.zero else 1),
        method=method.always,
        staging=method.staging,
        buckets=shard if synchronises else 0.0,
        activations=gathered(recipe, model) + measure(recipe, model, backward, world_size),
    )


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
    """Bytes of what language.zeroth.blocks.BlockStream holds: three blocks, what belongs to none, and where the largest
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
