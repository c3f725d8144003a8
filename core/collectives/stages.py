"""Stages that send one member's tensor to all, or every member's. For a stage see core/groups.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..groups import Stage


def send_first(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Stage:
    """Starts sending the first member's values of each tensor to all; the bytes are the members' mean."""
    works = [dist.broadcast(flat, group_src=0, group=group, async_op=True) for flat in flats if flat.numel()]
    n = dist.get_world_size(group)
    sent = sum(round((n - 1) / n * flat.nbytes) for flat in flats)
    return [work for work in works if work is not None], sent


def all_gather(to: Tensor, own: Tensor, group: dist.ProcessGroup) -> Stage:
    """Part i of `to`, which is contiguous, becomes `own` of worker i."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, torch < 2.13
    work = gather(to.view(-1), own, group=group, async_op=True)
    assert work is not None
    return [work], (dist.get_world_size(group) - 1) * own.nbytes


def gather_parts(flat: Tensor, group: dist.ProcessGroup) -> Stage:
    """All-gather in place: every worker gets part i of `flat` from worker i."""
    return all_gather(flat, flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)].clone(), group)
