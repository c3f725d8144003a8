"""The work and the memory of a recipe's step, counted from shapes before a run, without memory for the model.

torch's FlopCounterMode counts the forward pass under FakeTensorMode. Hours follow from the share of a GPU's peak speed
that published runs reach. They leave out loading, evaluations, checkpoints and communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from training.recipe import Recipe

PEAKS = {"A100": 312e12, "RTX 3090": 71e12}  # FLOP/s of products in 16 bits, as in training/plan/presets.toml

# Shares of the peak on A100 and RTX 3090, by the first letters of a model's name. The sources are:
# resnet: NVIDIA's DeepLearningExamples, 16,621 images/s on 8 A100; timm's benchmark-train-amp-nhwc-pt112-cu113-rtx3090
# vit: assumed from NeMo's ViT-g/14, 693 images/s on 8 A100, which is 0.44; timm's benchmark, 393 images/s
# swin, regnety: assumed; timm's benchmark, 649 and 83 images/s
# gpt2: assumed from Megatron-LM's 1.7 billion parameters, 0.44 (arXiv 2104.04473)
# all other shares: assumed
EFFICIENCY = {
    "resnet": (0.16, 0.42),
    "vit": (0.35, 0.58),
    "swin": (0.2, 0.25),
    "regnety": (0.25, 0.11),
    "upernet": (0.25, 0.25),
    "points": (0.1, 0.1),
    "gpt2": (0.4, 0.4),
    "roberta": (0.35, 0.35),
    "transnormer": (0.4, 0.4),
}
ASSUMED = (0.25, 0.25)  # of models that the table lacks
UNCOUNTED = DataDependentOutputException, DynamicOutputShapeException  # raised for a model that looks at values


@dataclass(frozen=True)
class Work:
    """A task's part of the count.

    Attributes:
        model: Name of the model, for EFFICIENCY.
        forward: Returns the loss, or the outputs, of a model for a number of samples. Values do not matter.
        samples: Samples of the training set, or None if only the data says.
        blocks: Returns the blocks that --recompute computes again. The default is none.
    """

    model: str
    forward: Callable[[nn.Module, int], Tensor]
    samples: int | None = None
    blocks: Callable[[Any], Iterable[nn.Module]] = lambda _: ()

    @property
    def shares(self) -> tuple[float, float]:
        return next((share for name, share in EFFICIENCY.items() if self.model.startswith(name)), ASSUMED)


@dataclass(frozen=True)
class Count:
    """The count of one worker.

    Attributes:
        flops: FLOPs of the products and convolutions of a step.
        activations: Bytes that the largest micro-batch keeps for its backward pass.
    """

    flops: float
    activations: float


class _WithoutDropout(TorchFunctionMode):
    """Drops attention's dropout, because only the CPU's attention keeps a matrix for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            kwargs = kwargs | {"dropout_p": 0.0}
        return func(*args, **kwargs)


class _Kept:
    """Adds up the bytes that autograd saves, each storage once, without the model's own."""

    def __init__(self, model: nn.Module):
        self.bytes = 0
        own = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
        self._seen = {storage._cdata: storage for storage in own}  # held, so that no other storage gets its address

    def save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.bytes += storage.nbytes()
        return tensor


def count(recipe: Recipe, build_model: Callable[[Recipe], nn.Module], work: Work, share: int) -> Count:
    """Counts a worker's step of `share` samples."""
    with torch.device("meta"):
        model = build_model(replace(recipe, recompute=False))
    largest = -(-share // recipe.accumulate)  # samples of the largest micro-batch
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bfloat16")
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={flash: _flash_flops})
    with FakeTensorMode(allow_non_fake_inputs=True), _WithoutDropout():
        _to_fake(model)
        kept = _Kept(model)
        inside = _measure_blocks(work.blocks(model), kept)
        with counter, mixed, saved_tensors_hooks(kept.save, lambda tensor: tensor):
            work.forward(model, largest)
    passes, activations = 3, kept.bytes
    if recipe.method == "zo":
        passes, activations = 2, 0
    elif recipe.recompute and inside:
        passes = 4
        activations += sum(given - own for given, own in inside) + max(own for _, own in inside)
    return Count(passes * counter.get_total_flops() * share / largest, activations)


def _flash_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop(query, key, value)


def _to_fake(model: nn.Module) -> None:
    """Replaces parameters and buffers on the meta device by fake ones on the CPU, which autocast supports."""
    made: dict[int, Any] = {}  # tied parameters stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = None if old is None else made[id(old)]


def _measure_blocks(blocks: Iterable[nn.Module], kept: _Kept) -> list[tuple[int, int]]:
    """Returns a list that gets, for each block, the bytes of its input and of its saved tensors."""
    found, before = list[tuple[int, int]](), list[int]()

    def start(_: nn.Module, __: Any) -> None:
        before.append(kept.bytes)

    def end(_: nn.Module, inputs: Any, __: Any) -> None:
        given = inputs[0].numel() * inputs[0].element_size() if inputs else 0
        found.append((given, kept.bytes - before.pop()))

    for block in blocks:
        block.register_forward_pre_hook(start)
        block.register_forward_hook(end)
    return found


def run_steps(recipe: Any, work: Work) -> int | None:
    """Returns the optimizer steps of the run, or None if only the data says."""
    epoch = getattr(recipe, "epoch_steps", None) or (work.samples and work.samples // recipe.batch_size)
    return epoch and epoch * recipe.epochs


def hours(flops: float, work: Work, workers: int, steps: int | None) -> str:
    """Returns a line with the hours on each GPU of PEAKS, or with the seconds of a step if `steps` is None."""
    told = []
    for (gpu, peak), share in zip(PEAKS.items(), work.shares, strict=True):
        seconds = flops / (share * peak)
        time = f"{seconds:.2g} s a step" if steps is None else f"{_two_digits(steps * seconds / 3600)} h"
        told.append(f"{time} on {workers} {gpu} at {share:.0%} of {peak / 1e12:.0f} TFLOP/s")
    return f"{flops / 1e12:.3g} TFLOP a step: {', '.join(told)}; without loading, evaluations and communication"


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def checkpoint_bytes(recipe: Recipe, trained: float, moments: int, workers: int, node: int) -> float:
    """Returns the bytes of a checkpoint. Equal tensors are written once, whichever workers hold them.

    Args:
        recipe: The run's recipe.
        trained: Bytes of the trained parameters.
        moments: Copies of the parameters in the inner optimizer's state.
        workers: Number of workers.
        node: Number of workers that synchronize every step.
    """
    apart = 1 if recipe.method in ("ddp", "zo") else workers // node  # sets of workers with their own optimizer state
    c, co2 = recipe.co2, recipe.method == "co2"
    # what each set has of its own: parameters, keep_local's snapshot or change, and the errors of a narrow format
    late = co2 and c.merge == "keep_local"
    keeps: int = recipe.method == "overlap_local" or late
    narrow = co2 and c.compression.format != "float32" and c.compression.error_feedback
    shared = {"ddp": 1, "zo": 1, "local": 1}.get(recipe.method, 3)  # parameters, outer iterate, outer momentum
    if co2:  # the averaged update, which takes the parameters' place in the count, and the errors of the averages
        shared += (not keeps) - (late and (node > 1 or recipe.shard or recipe.offload)) + narrow
        shared -= c.outer_momentum == 0 and c.gap == "none"  # then it is not stored
    keeps += late + narrow
    return trained * (apart * (moments + keeps) + shared)
