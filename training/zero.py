"""ZeRO inside a node (Rajbhandari et al., 2020): the node's workers share out what they need not all hold.

Stage 1 shares out the optimiser's state, with torch's ZeroRedundancyOptimizer. Stage 2 shares out the gradients too,
and stage 3 the parameters as well while no layer uses them; both are torch's FSDP2, `fully_shard`, which reshards the
parameters after the forward pass in stage 3 and not in stage 2.
CO2 takes the dimension across nodes: see core/sharded.py.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from core.buckets import local_shard
from core.comm import broadcast

Stage = Literal[0, 1, 2, 3]


def shard_model(
    model: nn.Module, mesh: DeviceMesh, stage: Stage, *, everywhere: bool = False, compute: torch.dtype = torch.float32
) -> nn.Module:
    """Stages 2 and 3: shards the parameters over the mesh's dimension "shard". Build the optimizer afterwards.

    Each element of a ModuleList, such as a transformer's block, is gathered by itself, and the rest as a whole. Every
    backward pass averages the gradients over the shards' workers; with `everywhere`, as ddp needs it, over all nodes
    (HSDP). compute: the dtype in which parameters are gathered; all else stays in float32.
    """
    if stage >= 2:
        # it would warn at every DTensor of a checkpoint
        logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
        over = mesh if everywhere else mesh["shard"]
        for group in over.get_all_groups():
            # once sharded they could not be compared
            broadcast([local_shard(p.detach()) for p in model.parameters()], group, next(model.parameters()).device)
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        policy = MixedPrecisionPolicy()
        if compute != torch.float32:
            policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)  # autocast casts them
        for block in [block for blocks in lists for block in blocks if any(True for _ in block.parameters())]:
            fully_shard(block, mesh=over, reshard_after_forward=stage == 3, mp_policy=policy)
        fully_shard(model, mesh=over, reshard_after_forward=stage == 3, mp_policy=policy)
    return model


def shard_optimizer(optimizer: torch.optim.Optimizer, mesh: DeviceMesh, stage: Stage) -> torch.optim.Optimizer:
    """Stage 1: shares the optimizer's state out over the mesh's "shard"; other stages return the optimizer as it is."""
    if stage != 1:
        return optimizer
    group = mesh["shard"].get_group()
    known = inspect.signature(type(optimizer)).parameters  # AdamW's defaults hold more than it takes
    settings = {k: v for k, v in optimizer.defaults.items() if k in known}
    groups = [dict(g) for g in optimizer.param_groups]
    return _LocallySaved(groups, optimizer_class=type(optimizer), process_group=group, **settings)


class _LocallySaved(ZeroRedundancyOptimizer):
    """torch's optimiser with a state_dict of this worker's part alone, since every worker writes its own checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        for mine, theirs in zip(self.param_groups, self.optim.param_groups, strict=True):
            theirs.update(group_settings(mine))  # a schedule moved the outer ones; torch copies them at the next step
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        for mine, theirs in zip(self.param_groups, self.optim.param_groups, strict=True):
            mine.update(group_settings(theirs))


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's learning rate and the like."""
    return {k: v for k, v in group.items() if k != "params"}


@contextlib.contextmanager
def gathered(model: nn.Module, stage: Stage) -> Iterator[None]:
    """Keeps a sharded model whole, for evaluations, in which workers may see different numbers of batches."""
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded:
        module.set_reshard_after_forward(stage == 3, recurse=False)
        module.reshard()
