"""SyncBN: torch's SyncBatchNorm over the workers whose images share batch statistics, in every forward pass.

Under a local method these are a node's workers, and each worker has the gradient of its node's summed loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from core import UserError
from core.methods import DDP, Method
from core.sharded.mesh import local_world_size
from training.workers import make_mesh

if TYPE_CHECKING:
    from segmentation.recipes import SegmentationRecipe
    from training.run import Run

DEVICES = ("cuda",)  # for which torch's SyncBatchNorm has kernels


def check_sync_bn(run: Run, recipe: SegmentationRecipe) -> None:
    """Refuses it where torch cannot, and where a run of that name would be one of plain BatchNorm."""
    if recipe.sync_bn == "no":
        return
    given = f"sync_bn={recipe.sync_bn!r}"
    if run.device.type not in DEVICES:
        raise UserError(f"{given} needs GPUs, torch has no SyncBatchNorm for a CPU: give --sync_bn no")
    of_node = recipe.per_node if recipe.per_node > 1 else local_world_size()
    if of_node < 2 and recipe.sync_bn == "node":
        raise UserError(f"{given} with 1 worker a node shares nothing: give --sync_bn no")


def share_statistics(run: Run, model: nn.Module, method: Method) -> None:
    """Gives each SyncBatchNorm layer its process group, that of the gradients where there is one; all must call it."""
    layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    if not layers:
        return
    everyone = run.recipe.sync_bn == "all" and isinstance(method, DDP)
    group = method.group if everyone else node_group(run)
    for layer in layers:
        layer.process_group = group


def node_group(run: Run) -> dist.ProcessGroup:
    """The group in which a node's workers synchronize gradients, or a new one of this machine's workers.

    torch needs one order of two NCCL groups' collectives on all ranks, and a wait() between an asynchronous one and
    the other group's next (torch.distributed.new_group). The workers of a node close rounds at the same steps, and the
    reduction's side stream waits, so both hold beside the method's own group. Not run on GPUs.
    """
    mesh = run.mesh or make_mesh(run.device, 0, 0, run.recipe.timeout)
    assert mesh is not None, "check_sync_bn refuses a node of one worker"
    return mesh.get_group("shard")
