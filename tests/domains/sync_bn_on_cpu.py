"""A node of two workers whose CPU has SyncBatchNorm: torch's own over gloo, with stand-ins for five kernels.

They compute as ATen's for CUDA do. x: [n, c, h, w], statistics: [c], or [workers, c] before the sum.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

from core import CO2Config
from core.methods import DDP
from segmentation import model as built
from segmentation.recipes import digits_small
from segmentation.train import make_model
from training.run import Run


def column(t: Tensor) -> Tensor:
    return t.view(1, -1, 1, 1)


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(mean, 1 / standard deviation)."""
    return x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + eps).rsqrt()


def gather_stats(
    _: Tensor, mean: Tensor, invstd: Tensor, running: Tensor, var: Tensor, momentum: float, eps: float, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Those of all workers' images; moves the running mean and variance."""
    n = counts.sum()
    share = (counts / n)[:, None]
    overall = (share * mean).sum(0)
    spread = (share * (invstd**-2 - eps + (mean - overall) ** 2)).sum(0)
    running.lerp_(overall, momentum)
    var.lerp_(spread * n / (n - 1), momentum)
    return overall, (spread + eps).rsqrt()


def normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, _: float) -> Tensor:
    return (x - column(mean)) * column(invstd * weight) + column(bias)


def reduce(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, ...]:
    total, by_x = dy.sum((0, 2, 3)), (dy * (x - column(mean))).sum((0, 2, 3))
    return total, by_x, by_x * invstd, total.clone()


def slope(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor, by_x: Tensor, count: Tensor
) -> Tensor:
    n = count.sum()
    return (dy - column(total / n) - (x - column(mean)) * column(invstd**2 * by_x / n)) * column(invstd * weight)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": normalise,
    "batch_norm_backward_reduce": reduce,
    "batch_norm_backward_elemt": slope,
}


def be_in_a_node(rank: int, world_size: int) -> torch.library.Library:
    """This process is one of a node's two workers, whose CPU has the kernels; torch and the script let it use them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "2"}
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)
    allowing = SimpleNamespace(**vars(torch._C) | {"_get_privateuse1_backend_name": lambda: "cpu"})
    mock.patch.object(batchnorm, "torch", SimpleNamespace(**vars(torch) | {"_C": allowing})).start()
    mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None).start()
    mock.patch.object(built, "DEVICES", ("cpu",)).start()
    return library


def of_two_images(**changes: Any) -> Any:
    """A recipe that gives each of four workers two images a step."""
    return replace(digits_small(), **{"device": "cpu", "batch_size": 8, "co2": CO2Config(tau=3)} | changes)


def one_pass(rank: int, settings: dict) -> dict[str, Any]:
    """A forward and backward pass on this worker's images, beside plain BatchNorm on all that it shares with."""
    recipe = of_two_images(**settings)
    with Run(recipe) as run:
        model = run.shard(make_model(recipe))
        _, method = run.make_method(model, torch.optim.SGD(model.parameters(), lr=0.1))
        built.share_statistics(run, model, method)
        layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        (group,) = {layer.process_group for layer in layers}
        members = dist.get_process_group_ranks(group)
        plain = make_model(replace(recipe, sync_bn="no"))
        plain.load_state_dict(model.state_dict())
        images = [torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(r)) for r in members]
        for network, given in ((model, images[members.index(rank)]), (plain, torch.cat(images))):
            network.train().backbone(given)[-1].square().sum().backward()
        errors = []
        for ours, theirs in zip(model.backbone.parameters(), plain.backbone.parameters(), strict=True):
            dist.all_reduce(ours.grad, group=group)  # of the workers' summed losses
            errors.append(float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
        for ours, theirs in zip(model.backbone.buffers(), plain.backbone.buffers(), strict=True):
            errors.append(float((ours - theirs).float().norm() / theirs.float().norm()))
        of_gradients = method.group if isinstance(method, DDP) else run.mesh and run.mesh.get_group("shard")
        method.finish()
        method.close()
    return {"members": members, "layers": len(layers), "error": max(errors), "same group": group is of_gradients}


def log_collectives(log: list[str]) -> None:
    """Notes the order in which this process starts collectives: what, and over how many workers."""

    def noted(name: str, start: Callable[..., Any], *args: Any, **options: Any) -> Any:
        group = next((a for a in (*args, *options.values()) if isinstance(a, dist.ProcessGroup)), None)
        log.append(f"{name} {dist.get_world_size(group)}")
        return start(*args, **options)

    for name in ("all_reduce", "all_gather"):
        mock.patch.object(dist, name, functools.partial(noted, name, getattr(dist, name))).start()
