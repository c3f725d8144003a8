"""ZeRO inside a node (Rajbhandari et al., 2020): the node's workers shard the state that they need not all hold.

Stage 1 shards the optimizer's state, with torch's ZeroRedundancyOptimizer. Stages 2 and 3 use torch's FSDP2,
`fully_shard`. Stage 2 also shards the gradients. Stage 3 also shards the parameters while no layer uses them: it
reshards them after the forward pass, which stage 2 does not. CO2 runs across nodes, see core/shares.py.
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
from core.groups import broadcast

Stage = Literal[0, 1, 2, 3]


def shard_model(
    model: nn.Module, mesh: DeviceMesh, stage: Stage, *, everywhere: bool = False, compute: torch.dtype = torch.float32
) -> nn.Module:
    """Shards the parameters over the mesh's dimension "shard", for stages 2 and 3. Build the optimizer afterwards.

    Each element of a ModuleList, such as a transformer's block, is gathered by itself, and the rest as a whole.

    The mesh is [nodes, workers per node]. With `everywhere`, each backward pass averages gradients over all nodes
    (HSDP), as ddp needs, and else over the shards' workers only. Gathered parameters have the dtype `compute`. All else
    stays in float32.
    """
    if stage >= 2:
        # Without this, torch warns at every DTensor of a checkpoint.
        logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
        over = mesh if everywhere else mesh["shard"]
        for group in over.get_all_groups():
            # The parameters are made equal here, because they cannot be compared after sharding.
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
    """Shards the optimizer's state over the mesh's "shard", for stage 1. Other stages return the optimizer as it is."""
    if stage != 1:
        return optimizer
    group = mesh["shard"].get_group()
    known = inspect.signature(type(optimizer)).parameters  # AdamW's defaults have more entries than its constructor
    settings = {k: v for k, v in optimizer.defaults.items() if k in known}
    groups = [dict(g) for g in optimizer.param_groups]
    return _LocallySaved(groups, optimizer_class=type(optimizer), process_group=group, **settings)


class _LocallySaved(ZeroRedundancyOptimizer):
    """torch's sharded optimizer with a state_dict of this worker's part, as every worker writes its own checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        for mine, theirs in zip(self.param_groups, self.optim.param_groups, strict=True):
            theirs.update(group_settings(mine))  # a schedule changed the outer groups; torch copies them a step later
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        for mine, theirs in zip(self.param_groups, self.optim.param_groups, strict=True):
            mine.update(group_settings(theirs))


def group_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's settings, such as its learning rate."""
    return {k: v for k, v in group.items() if k != "params"}


@contextlib.contextmanager
def gathered(model: nn.Module, stage: Stage) -> Iterator[None]:
    """Keeps a sharded model whole during evaluations, in which workers may see different numbers of batches."""
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded:
        module.set_reshard_after_forward(stage == 3, recurse=False)
        module.reshard()
