"""What a run refuses before its first step, and the dry run, which asks the same functions."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from core.errors import UserError
from core.methods import check_apart
from core.methods.ddp import check_wire
from core.sharded.mesh import check_shared, local_world_size
from training import memory
from training.layouts.layout import Layout
from training.recipe import Recipe, momentum_note
from training.sampling import per_worker, smallest_part
from training.workers import check_nodes, make_link, pick_device, rank, world_size


def check_start(recipe: Recipe, workers: int | None) -> int:
    """Refuses settings that do not go with so many workers (None: not known yet); returns the samples of each."""
    many = workers or 1
    share = per_worker(recipe.batch_size, recipe.data_workers(many))
    if recipe.elastic:
        per_worker(recipe.batch_size, many)
    recipe.check_share(many)
    if recipe.optim.name == "muon" and (recipe.zero or recipe.layout):
        given = f"layout={recipe.layout}" if recipe.layout else f"zero={recipe.zero}"
        raise UserError(f"{given} with optim name=muon: Muon takes whole matrices; leave it out, or give adamw")
    if recipe.layout and workers:
        Layout.parse(recipe.layout).check_devices(workers)
    if node := recipe.per_node or (local_world_size() if workers else 0):
        check_nodes(node, recipe.zero, workers or node)
    if recipe.method == "co2" and (node > 1 or recipe.layout):  # which shares its outer state out inside the node
        check_shared(recipe.co2, recipe.co2.wire.format)
    check_apart(recipe.method, recipe.co2, node)
    if recipe.method == "ddp":
        check_wire(recipe.ddp_wire, sharded=recipe.zero >= 2)
    return share


def check_batch_norm(recipe: Recipe, model: nn.Module, workers: int) -> None:
    """Refuses parts of a worker's batch that are too small for the model's BatchNorm; SyncBN sees the others' too."""
    share = per_worker(recipe.batch_size, recipe.data_workers(workers))
    plain = any(isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    if not plain or smallest_part(share, recipe.accumulate) >= recipe.least_part:
        return
    where = f"batch_size={recipe.batch_size} (global) over {workers} workers"
    if share < recipe.least_part:
        raise UserError(f"{where}: BatchNorm needs two samples a worker; give {2 * workers} or more")
    fits = max(n for n in range(1, recipe.accumulate) if smallest_part(share, n) >= recipe.least_part)
    raise UserError(
        f"accumulate={recipe.accumulate} with {where}: BatchNorm needs two samples in each part of a worker's {share}, "
        f"and one part has one; give --accumulate {fits}, or a larger batch"
    )


def dry_run(recipe: Recipe, build_model: Callable[[], nn.Module]) -> None:
    """Prints the resolved recipe, the model's size and the memory that each GPU needs. The model has no memory."""
    workers = world_size()
    share = check_start(recipe, workers if "WORLD_SIZE" in os.environ else None)
    make_link(recipe.link_mbit, pick_device(recipe.device))
    with torch.device("meta"):
        model = build_model()
    check_batch_norm(recipe, model, workers)
    if rank() == 0:
        print(json.dumps(dataclasses.asdict(recipe), indent=2, default=str))
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"{millions:.2f} M parameters, {workers} workers of {share} samples a step")
        if note := momentum_note(recipe, workers):
            print(note)
        print(*memory.lines(memory.estimate(recipe, model, workers), recipe), sep="\n")
