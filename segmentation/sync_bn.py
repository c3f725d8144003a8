"""SyncBN: torch's SyncBatchNorm over the workers whose images share batch statistics, in every forward pass.

Under a local method these are a node's. Each worker's gradient is then that of its node's summed loss by its own
parameters, for the backward pass sums what all of the node's losses say of the statistics.
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
    """Gives each SyncBatchNorm layer its process group; every worker must call it.

    That of the gradients where its workers synchronise these, too, so that one communicator carries both in one order.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    if not layers:
        return
    everyone = run.recipe.sync_bn == "all" and isinstance(method, DDP)
    group = method.group if everyone else node_group(run)
    for layer in layers:
        layer.process_group = group


def node_group(run: Run) -> dist.ProcessGroup:
    """That in which a node's workers synchronise gradients, or one made here of those that torchrun started on one
    machine; every worker must call it.

    The method's own group, whose all-reduce is hidden, is used beside it. Of two NCCL groups torch asks for one order
    of their collectives on all ranks, and for a wait() that orders streams between an asynchronous one and the next of
    the other group (torch.distributed.new_group). Both hold where workers of a node close rounds at the same steps, as
    the recipe makes sure: the calling thread queues all of a reduction there, and its side stream waits (Flight).
    NCCL may then hold MAX_CTAS multiprocessors until the last node has come; these collectives run on others. DDP does
    not wait for a bucket before the next layer's backward pass. Its order is autograd's, the same on all ranks, and
    torch's own example of SyncBatchNorm stands beside DDP in that way. Not run on GPUs.
    """
    mesh = run.mesh or make_mesh(run.device, 0, 0, run.recipe.timeout)
    assert mesh is not None, "check_sync_bn refuses a node of one worker"
    return mesh.get_group("shard")
