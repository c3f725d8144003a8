"""SyncBN inside a node: torch's own SyncBatchNorm over gloo, with stand-ins for the five kernels that CPUs lack."""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel

from core import CO2Config, UserError
from core.methods import DDP
from core.testing import run_distributed
from segmentation import sync_bn
from segmentation.data import build_dataset
from segmentation.recipes import RECIPES, digits_small
from segmentation.train import fake_step, make_model, train
from tests.scripts import Mistakes
from training.checks import dry_run
from training.run import Run

# -- the kernels, as ATen's for CUDA compute them; x: [n, c, h, w], statistics: [c], or [workers, c] before the sum ---


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
    mock.patch.object(sync_bn, "DEVICES", ("cpu",)).start()
    return library


def of_two_images(**changes: Any) -> Any:
    """A recipe that gives each of four workers two images a step."""
    return replace(digits_small(), **{"device": "cpu", "batch_size": 8, "co2": CO2Config(tau=3)} | changes)


# -- on four workers, two a node ----------------------------------------------------------------------------------


def one_pass(rank: int, settings: dict) -> dict[str, Any]:
    """A forward and backward pass on this worker's images, beside plain BatchNorm on all that it shares with."""
    recipe = of_two_images(**settings)
    with Run(recipe) as run:
        model = run.shard(make_model(recipe))
        _, method = run.make_method(model, torch.optim.SGD(model.parameters(), lr=0.1), total=3)
        sync_bn.share_statistics(run, model, method)
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


def work(rank: int, world_size: int, folder: str, passes: list[dict], jobs: dict[str, dict]) -> tuple[list, list[str]]:
    """(what each pass found, the collectives of the loop in their order); the loop: 24 scenes, three steps an epoch."""
    kernels = be_in_a_node(rank, world_size)
    found = [one_pass(rank, {"out": Path(folder, f"pass{i}")} | settings) for i, settings in enumerate(passes)]
    log: list[str] = []
    log_collectives(log)
    train_set = build_dataset("digits", "train").get_subset(24)
    eval_sets = {"val": build_dataset("digits", "val").get_subset(4)}
    for name, changes in jobs.items():
        recipe = of_two_images(**{"epochs": 2, "log_every": 1, "sync_bn": "node", "out": Path(folder, name)} | changes)
        with Run(recipe) as run:
            train(run, recipe, train_set, eval_sets)
    del kernels
    return found, log


ON_ARRIVAL = CO2Config(tau=2, outer_momentum=0.0, gap="none", merge="keep", delay="auto")
NODES, ALL = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize(
    ("passes", "jobs"),
    [
        ([({"method": "co2"}, NODES, False)], {"on_arrival": {"co2": ON_ARRIVAL}}),
        pytest.param(
            [
                ({"method": "local", "per_node": 2}, NODES, True),
                ({"method": "ddp"}, NODES, False),
                ({"method": "ddp", "sync_bn": "all"}, ALL, True),
            ],
            {
                "co2": {},
                "ddp": {"method": "ddp"},
                "local": {"method": "local", "per_node": 2},
                "auto": {"co2": CO2Config(tau="auto")},
                "overlap": {"method": "overlap_local"},
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_nodes_workers_share_statistics_and_start_all_collectives_in_one_order(
    passes: list[tuple[dict, list, bool]], jobs: dict[str, dict], tmp_path: Path
) -> None:
    """One order is what torch asks of processes that use two of NCCL's groups; where a pass's workers synchronise
    gradients, too, both go over one group. Statistics and gradients are those of all the images that are shared."""
    settings = [{"sync_bn": "node"} | of for of, _, _ in passes]
    ranks = run_distributed(work, 4, str(tmp_path), settings, jobs, timeout=300)
    for i, (_, members, of_gradients) in enumerate(passes):
        found = [of_rank[i] for of_rank, _ in ranks]
        assert [f["members"] for f in found] == members
        assert all(f["layers"] > 20 and f["same group"] == of_gradients and f["error"] < 1e-3 for f in found), found
    first, *others = [log for _, log in ranks]
    assert all(log == first for log in others)
    assert {"all_gather 2", "all_reduce 2", "all_reduce 4"} <= set(first)
    for name in jobs:
        assert json.loads((tmp_path / name / "summary.json").read_text())["steps"] == 6


# -- what is refused, and what is built ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_bn": "all"}, "sync_bn='all' does not go with method='co2'"),
        ({"skip_after": 1.0, "co2": ON_ARRIVAL}, "sync_bn='node' does not go with skip_after"),
        ({"elastic": True}, "sync_bn='node' does not go with elastic"),
        ({"co2": CO2Config(tau=6, steps="by_speed")}, "sync_bn='node' does not go with co2.steps='by_speed'"),
        ({"co2": replace(ON_ARRIVAL, tau="auto")}, "does not go with co2.tau='auto' and co2.delay='auto'"),
    ],
)
def test_what_leads_workers_of_a_node_apart_is_refused(settings: dict, message: str) -> None:
    """One would wait in a forward pass for another that waits at its boundary."""
    with pytest.raises(UserError) as error:
        replace(digits_small(), **{"sync_bn": "node"} | settings)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_run_that_cannot_share_statistics_is_refused(tmp_path: Path, mistake: Mistakes) -> None:
    out = ("--out", str(tmp_path / "run"), "--device", "cpu", "--batch_size", "4")
    text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' needs GPUs, torch has no SyncBatchNorm for a CPU: give --sync_bn no" in text
    with mock.patch.object(sync_bn, "DEVICES", ("cpu",)):
        text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' with 1 worker a node shares nothing: give --sync_bn no" in text


def test_a_dry_run_stands_for_the_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "128")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    recipe = RECIPES["ade20k_resnet50"]
    assert recipe.sync_bn == "node"
    dry_run(recipe, lambda: make_model(recipe), fake_step)
    text = capsys.readouterr().out
    assert '"sync_bn": "node"' in text and "128 workers of 2 samples a step" in text


@pytest.mark.parametrize(("setting", "kind"), [("no", "BatchNorm2d"), ("node", "SyncBatchNorm")])
@pytest.mark.parametrize("method", ["ddp", "co2", "slowmo"])
def test_the_layers_are_what_the_recipe_says(setting: Any, kind: str, method: Any) -> None:
    recipe = replace(RECIPES["ade20k_resnet50"], method=method, sync_bn=setting)
    with torch.device("meta"):
        assert {type(m).__name__ for m in make_model(recipe).modules() if "BatchNorm" in type(m).__name__} == {kind}
