"""The checks before a run's first step, and the dry run, which makes the same checks and estimates each GPU's memory.

The estimate leaves out activations, and the temporary buffers of a backward pass and of a compressed all-reduce.
RESERVE covers the CUDA context, the buffers of NCCL and cuDNN, and fragmentation.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from core.baselines.ddp import check_compression
from core.errors import UserError
from core.groups import local_world_size
from core.guards.inputs import check_share
from training.data.samples import per_worker, smallest_part
from training.layout import Layout
from training.recipe import Recipe, momentum_note
from training.start.workers import check_nodes, make_link, pick_device, rank, world_size

R = TypeVar("R", bound=Recipe)
GIB = 1 << 30  # bytes; a GPU sold as 24 GB has 24 GiB
RESERVE = 1.5 * GIB
# float32 copies of the trained parameters that a method keeps, such as outer iterate, momentum and all-reduce buffer
COPIES = {"ddp": 0, "local": 1, "slowmo": 3, "overlap_local": 3, "co2": 3, "diloco": 3, "zo": 1}


def size_of(params: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in params)


def estimate(recipe: Recipe, model: nn.Module, world_size: int) -> dict[str, float]:
    """Returns the bytes of each part of the memory of one of `world_size` workers.

    parameters includes their running average, method is the method's state, and buckets is DDP's copy of the gradients.
    The whole model may be on the meta device.
    """
    node = recipe.per_node or local_world_size()
    size, trained = size_of(model.parameters()), size_of(p for p in model.parameters() if p.requires_grad)
    parts = node if recipe.zero >= 2 else 1
    zeroth_order = recipe.method == "zo"
    synchronizes = world_size > 1 and recipe.zero < 2 and (recipe.method == "ddp" or node > 1)
    return {
        "parameters": streamed(model) if zeroth_order and recipe.offload else size / parts * (1 + bool(recipe.ema)),
        "gradients": 0.0 if zeroth_order else trained / parts,
        "optimizer": moments(recipe) * trained / (node if recipe.zero else 1),
        "method": held(recipe, model, node, world_size),
        "buckets": trained if synchronizes and not zeroth_order else 0.0,
        "gathered": gathered(recipe, model),
        "reserve": RESERVE,
    }


def moments(recipe: Recipe) -> int:
    """Returns the copies of the parameters in the inner optimizer's state, 2 for Muon, which has 1 or 2."""
    return {"sgd": 1 if recipe.optim.momentum else 0}.get(recipe.optim.name, 2)


def held(recipe: Recipe, model: nn.Module, node: int, workers: int) -> float:
    """Returns the bytes of the method's state on one of `workers` workers, of which `node` synchronize every step.

    Error feedback keeps one copy of the errors, and 1/n of a copy for the part that this worker averages. L-GreCo keeps
    two more copies.
    """
    trained = size_of(p for p in model.parameters() if p.requires_grad)
    method, trained = recipe.method, trained / (node if recipe.zero >= 2 else 1)
    if recipe.offload:
        return 0.0
    if method == "co2" and (node > 1 or recipe.shard) and not recipe.elastic:
        return trained * held_of_share(recipe, node if recipe.zero < 2 else 1, workers // node)
    copies: float = COPIES[method]
    copies += method == "co2" and recipe.co2.merge == "keep_local"
    copies += method == "co2" and recipe.co2.nesterov and recipe.co2.gap != "none"
    if recipe.elastic and recipe.co2.compression.format in ("float32", "auto"):
        return trained * (copies + 1)  # a copy of what is sent
    config = recipe.ddp_compression if method == "ddp" else recipe.co2.compression  # pyright: ignore[reportAttributeAccessIssue]
    among = workers if method == "ddp" or recipe.elastic else workers // node
    alone = workers == 1 and (method == "ddp" or config.format == "auto")  # then nothing is encoded
    if config.format != "float32" and method != "zo" and not alone:
        copies += {"ddp": 1, "local": 1}.get(method, 0)  # a payload, or an anchor for the differences that are sent
        copies += 1 + 1 / among
        copies += 2 * (config.format == "lgreco")
    return trained * copies


def held_of_share(recipe: Recipe, parts: int, nodes: int) -> float:
    """Returns the copies of a rank's parameters that CO2 holds on a node or with --shard (core/shares.py).

    A payload has `parts` shares in each of the nodes.
    """
    c, share, own = recipe.co2, 1 / parts, 1 / parts / (nodes if recipe.shard else 1)
    paper = c.merge != "keep_local" and c.is_a_round_late
    copies = 1 + own + (2 * own if recipe.shard and paper else share)  # payload, momentum, outer iterate
    copies += share * (c.merge == "keep_local") + own * (c.nesterov and (paper or c.gap != "none"))
    narrow = c.compression.format != "float32" and (nodes > 1 or c.compression.format != "auto")
    if narrow:
        copies += share + (0 if recipe.shard else share / nodes)
        copies += 2 * share * (c.compression.format == "lgreco")
    return copies


def gathered(recipe: Recipe, model: nn.Module) -> float:
    """Returns the bytes of whole parameters and gradients that FSDP2 holds at once (training.layouts.zero.shard_model).

    ZeRO-2 holds all parameters. ZeRO-3 holds the parameters of two blocks, and all parameters outside blocks. Gradients
    of as many parameters, and their reduction, come on top.
    """
    if recipe.zero < 2:
        return 0.0
    size = 2 if recipe.precision == "bfloat16" else 4
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    whole = sum(p.numel() for p in model.parameters())
    few = whole - sum(blocks) + 2 * max(blocks, default=0)
    return size * (few if recipe.zero == 3 else whole) + (size + 4) * few


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns all modules that are in module lists."""
    return [block for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]


def streamed(model: nn.Module) -> float:
    """Returns the bytes that language.zeroth.blocks.BlockStream holds: three blocks, and twice all other parameters."""
    blocks = [size_of(block.parameters()) for block in blocks_of(model)]
    return 2 * (size_of(model.parameters()) - sum(blocks)) + 3 * max(blocks, default=0)


def checkpoint_bytes(recipe: Recipe, trained: float, workers: int, node: int) -> float:
    """Returns the bytes of a checkpoint of `trained` bytes of trained parameters.

    Equal tensors are written once, whichever workers hold them. In every step, `node` workers synchronize.
    """
    apart = 1 if recipe.method in ("ddp", "zo") else workers // node  # sets of workers with their own optimizer state
    c, co2 = recipe.co2, recipe.method == "co2"
    # what each set has of its own: parameters, keep_local's snapshot or change, and the errors of a narrow format
    late = co2 and c.merge == "keep_local"
    keeps: int = recipe.method == "overlap_local" or late
    narrow = co2 and c.compression.format != "float32"
    shared = {"ddp": 1, "zo": 1, "local": 1}.get(recipe.method, 3)  # parameters, outer iterate, outer momentum
    if co2:  # the averaged update, which takes the parameters' place in the count, and the errors of the averages
        shared += (not keeps) - (late and (node > 1 or recipe.shard or recipe.offload)) + narrow
        shared -= c.outer_momentum == 0 and c.gap == "none"  # then it is not stored
    keeps += late + narrow
    return trained * (apart * (moments(recipe) + keeps) + shared)


def lines(memory: dict[str, float], recipe: Recipe) -> Iterator[str]:
    """Yields a line with the bytes of each part, and a warning if they exceed recipe.gpu_gb."""
    total = sum(memory.values())
    gb = {name: f"{value / GIB:.1f}" for name, value in memory.items()}
    more = "".join(f", {what} {gb[what]}" for what in ("buckets", "gathered") if memory[what])
    yield (
        f"{total / GIB:.1f} GiB a GPU and activations: parameters {gb['parameters']}, gradients {gb['gradients']}, "
        f"optimizer {gb['optimizer']}, {recipe.method} {gb['method']}{more}, {gb['reserve']} for CUDA"
    )
    if recipe.gpu_gb is not None and total > recipe.gpu_gb * GIB:
        yield (
            f"warning: gpu_gb={recipe.gpu_gb:g} is less: a higher --zero needs less, as do --accumulate, --recompute, "
            "--shard of co2, --offload of co2 and zo, compression.format float32, and of co2 merge restart"
        )


# -- refusals, and the dry run ----------------------------------------------------------------------------------------


def check_start(recipe: Recipe, workers: int | None) -> int:
    """Refuses settings that do not work with this number of workers (None: not known yet).

    Returns:
        The number of samples of each worker in a step.
    """
    many = workers or 1
    share = per_worker(recipe.batch_size, recipe.data_workers(many))
    recipe.check_share(many)
    if recipe.optim.name == "muon" and (recipe.zero or recipe.layout):
        given = f"layout={recipe.layout}" if recipe.layout else f"zero={recipe.zero}"
        raise UserError(f"{given} with optim name=muon: Muon takes whole matrices; leave it out, or give adamw")
    layout = Layout.parse(recipe.layout) if recipe.layout else None
    if layout and workers:
        layout.check_devices(workers)
    if node := recipe.per_node or (local_world_size() if workers else 0):
        check_nodes(node, recipe.zero, workers or node)
    if recipe.method == "co2" and (node > 1 or layout):  # a rank holds a share of the outer state
        held = layout is not None and layout.is_cut
        check_share(recipe.co2, shard=recipe.shard, split=recipe.zero >= 2, held=held)
    if recipe.method == "ddp":
        check_compression(recipe.ddp_compression, sharded=recipe.zero >= 2)
    return share


def check_batch_norm(recipe: Recipe, model: nn.Module, workers: int) -> None:
    """Refuses parts of a worker's batch that are too small for BatchNorm, except for SyncBatchNorm."""
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


def dry_run(recipe: R, build_model: Callable[[R], nn.Module]) -> None:
    """Prints the resolved recipe, and its memory and checkpoints, without allocating the model."""
    workers = world_size()
    share = check_start(recipe, workers if "WORLD_SIZE" in os.environ else None)
    if recipe.link_mbit is not None:  # else a login node without the recipe's GPUs will do
        make_link(recipe.link_mbit, pick_device(recipe.device))
    with torch.device("meta"):
        model = build_model(recipe)
    check_batch_norm(recipe, model, workers)
    if rank() > 0:
        return
    print(json.dumps(dataclasses.asdict(recipe), indent=2, default=str))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.2f} M parameters, {workers} workers of {share} samples a step")
    if note := momentum_note(recipe, workers):
        print(note)
    print(*lines(estimate(recipe, model, workers), recipe), sep="\n")
    node = recipe.per_node or local_world_size()
    trained = size_of(p for p in model.parameters() if p.requires_grad)
    written = checkpoint_bytes(recipe, trained, workers, node)
    size = f"{written / 1e9:.3g}" if written < 1e12 else f"{written / 1e9:.0f}"  # not 1e+03
    print(f"{size} GB a checkpoint, of which the run folder keeps two")
